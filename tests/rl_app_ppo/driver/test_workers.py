"""The worker processes of a run in a Ray that declares GPUs: what each of them sees."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_app_ppo.config import rollout_engines
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.outputs.run_folder import RunFiles

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


def test_every_process_sees_the_gpus_of_the_plan_and_no_others(gcs_address, tmp_path, monkeypatch):
    """A process of a role without GPU sees none; Ray alone would show it all of the node."""
    del gcs_address
    from rl_app_ppo.driver.workers import WorkerPool

    monkeypatch.setattr(rollout_engines, "require_vllm", lambda: SimpleNamespace(device="cuda"))
    config = load_config(
        [
            "model_engine=fsdp",
            "fsdp.world_size=2",
            "placement=actor+ref",
            "rollout.name=vllm",
            "rollout.num_workers=1",
            "rollout.tensor_model_parallel_size=3",
            "ray.start_timeout_s=400",
        ]
    )
    files, said = RunFiles(folder=tmp_path), list[str]()
    files.logs.mkdir(parents=True)
    pool = WorkerPool(config, files)

    async def seen():
        await pool.require_resources(said.append)
        with closing(pool):
            pool.start()
            await asyncio.gather(*(process.ready(tmp_path, 400) for process in pool.processes))
            look = [
                process.actor.__ray_call__.remote(lambda _: os.environ.get("CUDA_VISIBLE_DEVICES"))
                for process in pool.processes
            ]
            return dict(zip([process.name for process in pool.processes], await asyncio.gather(*look), strict=True))

    environment = asyncio.run(seen())
    assert environment["reward"] == "", "without the variable it would see all GPUs"
    devices = {name: visible.split(",") if visible else [] for name, visible in environment.items()}
    counts = {name: len(each) for name, each in devices.items()}
    assert counts == {"actor_ref": 1, "actor_ref-1": 1, "rollout-0": 3, "reward": 0}
    used = [device for each in devices.values() for device in each]
    assert len(set(used)) == len(used) == 5
    assert set(used) <= set(map(str, range(GPUS)))
    assert said == ["GPUs: 5 of 6 of this node: actor_ref 1, actor_ref-1 1, rollout-0 3"]


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


def test_forked_workers_of_a_local_ray_train_with_the_gpus_of_the_plan(base_model, tmp_path):
    done = python(
        *("-c", LOCAL, f"model.path={base_model}", f"trainer.output_dir={tmp_path}"),
        *("trainer.total_training_steps=1", "trainer.test_freq=0", "trainer.val_before_train=false"),
        *("data.val_size=8", "data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "ray.start_timeout_s=400"),
        *("model_engine=fsdp", "fsdp.world_size=2", "rollout.num_workers=1", "placement=actor+ref"),
    )
    assert done.returncode == 0, done.stderr
    assert "GPUs: 3 of 6 of this node: actor_ref 1, actor_ref-1 1, rollout-0 1" in done.stdout
