"""The worker processes of a run in a Ray that declares GPUs: what each of them sees."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from rl_app_ppo.config import rollout_engines
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_ckpt_engine import PluginPolicy
from rl_transferqueue import PlaneDescriptor

if TYPE_CHECKING:
    from rl_app_ppo.cluster.ray_actor import RayProcess

pytestmark = pytest.mark.slow
GPUS = 6


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these words to its end."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=500, check=False)


@pytest.fixture(scope="module")
def gcs_address():
    """The address of a Ray with one node of GPUs that exist only by declaration."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=GPUS,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
        )
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


@pytest.fixture
def vllm_pool(gcs_address, tmp_path, monkeypatch):
    """Make the pool of a run with FSDP2 and vLLM for GPUs in that Ray."""
    del gcs_address
    from rl_app_ppo.driver.workers import WorkerPool

    def make(*overrides: str, tensor_parallel: int) -> WorkerPool:
        monkeypatch.setattr(rollout_engines, "require_vllm", lambda: SimpleNamespace(device="cuda"))
        size = f"rollout.tensor_model_parallel_size={tensor_parallel}"
        config = load_config(["model_engine=fsdp", "rollout.name=vllm", size, "ray.start_timeout_s=400", *overrides])
        files = RunFiles(folder=tmp_path)
        files.logs.mkdir(parents=True)
        return WorkerPool(config, files)

    return make


async def visible_gpus(processes):
    """Return the GPUs that each process sees, by its name."""
    look = [one.actor.__ray_call__.remote(lambda _: os.environ.get("CUDA_VISIBLE_DEVICES")) for one in processes]
    return dict(zip([process.name for process in processes], await asyncio.gather(*look), strict=True))


def test_every_process_sees_the_gpus_of_the_plan_and_no_others(vllm_pool):
    """A process of a role without GPU sees none; Ray alone would show it all of the node."""
    said = list[str]()
    pool = vllm_pool("fsdp.world_size=2", "placement=actor+ref", "rollout.num_workers=1", tensor_parallel=3)

    async def started():
        await pool.require_resources(said.append)
        with closing(pool):
            pool.start()
            await asyncio.gather(*(process.ready(400) for process in pool.processes))
            return await visible_gpus(pool.processes)

    environment = asyncio.run(started())
    assert environment["reward"] == "", "without the variable it would see all GPUs"
    devices = {name: visible.split(",") if visible else [] for name, visible in environment.items()}
    counts = {name: len(each) for name, each in devices.items()}
    assert counts == {"actor_ref": 1, "actor_ref-1": 1, "rollout-0": 3, "reward": 0}
    used = [device for each in devices.values() for device in each]
    assert len(set(used)) == len(used) == 5
    assert set(used) <= set(map(str, range(GPUS)))
    assert said == ["GPUs: 5 of 6 of this node: actor_ref 1, actor_ref-1 1, rollout-0 3"]


def test_replicas_see_the_gpus_of_the_ranks_that_lend_them_also_after_a_restart(vllm_pool, tmp_path, monkeypatch):
    """They are built last: vLLM takes a part of the memory that is free then."""
    from rl_app_ppo.cluster.ray_actor import RayProcess

    built = list[str]()

    async def build(process, payload, *, timeout_s):
        process._built = payload, timeout_s
        built.append(f"{process.name} begins")
        await asyncio.sleep(0)
        built.append(f"{process.name} ends")

    monkeypatch.setattr(RayProcess, "build", build)
    said = list[str]()
    pool = vllm_pool("fsdp.world_size=4", "rollout.share_gpus=true", tensor_parallel=2)

    async def twice():
        await pool.require_resources(said.append)
        with closing(pool):
            pool.start()
            await pool.ready(tmp_path)
            before = await visible_gpus(pool.processes)
            await pool.build(tmp_path, cast(PlaneDescriptor, None), PluginPolicy(), {})
            (replica,) = [process for process in pool.processes if process.name == "rollout-1"]
            await replica.restart()
            return before, await visible_gpus([replica])

    before, after = asyncio.run(twice())
    ranks = [before[name] for name in ("actor_ref", "actor_ref-1", "actor_ref-2", "actor_ref-3")]
    assert len(set(ranks)) == 4
    assert [before["rollout-0"], before["rollout-1"]] == [",".join(ranks[:2]), ",".join(ranks[2:])]
    assert before["reward"] == ""
    assert after == {"rollout-1": before["rollout-1"]}
    assert said[0].startswith("GPUs: 4 of 6 of this node: actor_ref 1, ")
    last = max(i for i, line in enumerate(built) if line.endswith("ends") and "rollout" not in line)
    assert [line for line in built[:last] if "rollout" in line] == []
    assert built.count("rollout-1 begins") == 2


@pytest.mark.parametrize(("backend", "peer"), [("tcp", ""), ("nccl", "head"), ("delta-nccl", "head")])
def test_ranks_of_one_host_meet_where_nccl_reaches_the_replicas_of_another(backend, peer, tmp_path, monkeypatch):
    """NCCL keeps the interface of its first group in a process."""
    from rl_app_ppo.driver import workers

    monkeypatch.setattr(workers, "head_host", lambda: "head")
    config = load_config([f"checkpoint_engine.backend={backend}", "trainer.nnodes=2", "trainer.n_gpus_per_node=8"])
    pool = workers.WorkerPool(config, RunFiles(folder=tmp_path))
    pool.processes = cast("list[RayProcess]", [SimpleNamespace(network=name) for name in ("here", "here", "there")])
    assert pool._network_of_ranks(pool.processes[:2]).peer == peer
    assert pool._network_of(pool.processes[:2]).peer == ""


def test_a_cluster_that_is_too_small_is_refused_before_a_process_starts(gcs_address, base_model, tmp_path):
    done = python(
        *(str(Path(__file__).parents[3] / "apps" / "ppo"), f"ray.address={gcs_address}", f"model.path={base_model}"),
        *(f"trainer.output_dir={tmp_path / 'outputs'}", "model_engine=fsdp", f"fsdp.world_size={GPUS + 1}"),
        *("fsdp.device=cuda", "rollout.device=cpu", "placement=actor+ref"),
    )
    assert done.returncode == 2, done.stderr
    assert f"need {GPUS + 1} GPUs of one node" in done.stderr
    assert f"and {GPUS} can be used on this one" in done.stderr
    assert f"not enough are left for actor_ref-{GPUS}. Lower fsdp.world_size." in done.stderr
    assert not list((tmp_path / "outputs").glob("*"))


LOCAL = """
import os, sys
from rl_app_ppo.cluster.environment import ray_settings
os.environ.update(ray_settings(local=True))  # as the app does before it imports Ray
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
NvidiaGPUAcceleratorManager.get_current_node_num_accelerators = staticmethod(lambda: 6)
from rl_app_ppo.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""The app on a machine whose driver counts 6 GPUs, with which torch can do nothing."""


def test_forked_workers_of_a_local_ray_train_with_the_gpus_of_the_plan(base_model, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")  # as other trainers need it
    done = python(
        *("-c", LOCAL, f"model.path={base_model}", f"trainer.output_dir={tmp_path}"),
        *("trainer.total_training_steps=1", "trainer.test_freq=0", "trainer.val_before_train=false"),
        *("data.val_size=8", "data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "ray.start_timeout_s=400"),
        *("model_engine=fsdp", "fsdp.world_size=2", "rollout.num_workers=1", "placement=actor+ref"),
    )
    assert done.returncode == 0, done.stderr
    assert "GPUs: 3 of 6 of this node: actor_ref 1, actor_ref-1 1, rollout-0 1" in done.stdout
