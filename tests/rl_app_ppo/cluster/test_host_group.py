"""A run over two nodes of a Ray cluster with GPUs that exist only by declaration."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_app_ppo.cluster import host_group
from rl_app_ppo.cluster.host_group import HostGroup, compare_versions
from rl_app_ppo.config import rollout_engines
from rl_app_ppo.config.hosts import HostBundle
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.config.schema import ALL_GPUS
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_protocol import ConfigError, WorkerError

GPUS = 4
NODE = {"num_cpus": 4, "num_gpus": GPUS}
TWO = (
    "trainer.nnodes=2",
    f"trainer.n_gpus_per_node={GPUS}",
    "ray.address=auto",
    "ray.cpus_per_worker=0.5",
    "ray.start_timeout_s=400",
    "model_engine=fsdp",
    "placement=actor+ref",
)


def test_a_node_with_other_versions_is_named():
    here = {"Python": "3.11.9", "Ray": "2.60.0"}
    compare_versions(here, {"10.0.0.1": here, "10.0.0.2": dict(here)})
    with pytest.raises(
        ConfigError, match=r"this one has Python 3\.11\.9, Ray 2\.60\.0, and there is Ray 2\.59\.0 on 10\.0\.0\.2\."
    ):
        compare_versions(here, {"10.0.0.1": here, "10.0.0.2": here | {"Ray": "2.59.0"}})


@pytest.fixture(scope="module")
def nodes():
    """A Ray cluster of two nodes, to which this process is connected."""
    import ray
    from two_nodes import several_nodes  # Ray imports this module in workers, which do not find helpers

    with several_nodes(NODE, NODE) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()


@pytest.fixture
def cluster(nodes):
    """Its address."""
    return nodes.address


@pytest.fixture
def pool_of(cluster, tmp_path, monkeypatch):
    """A function that makes the pool of a configuration, whose vLLM computes on GPUs."""
    del cluster
    from rl_app_ppo.driver.workers import WorkerPool

    monkeypatch.setattr(rollout_engines, "require_vllm", lambda: SimpleNamespace(device="cuda"))
    files = RunFiles(folder=tmp_path)
    files.logs.mkdir(parents=True)
    return lambda *overrides: WorkerPool(load_config([*TWO, *overrides]), files)


def place(_):
    """Node and visible GPUs of an actor's process."""
    import ray

    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.slow
def test_groups_are_on_the_nodes_of_the_plan_and_see_their_own_gpus(pool_of):
    """Four ranks fill one node, and two replicas of two GPUs each the other."""
    said = list[str]()
    pool = pool_of("fsdp.world_size=4", "rollout.name=vllm", "rollout.tensor_model_parallel_size=2")

    async def seen():
        await pool.require_resources(said.append)
        with closing(pool):
            pool.start()
            await asyncio.gather(*(process.ready(400) for process in pool.processes))
            looks = [process.actor.__ray_call__.remote(place) for process in pool.processes]
            return dict(zip([process.name for process in pool.processes], await asyncio.gather(*looks), strict=True))

    found = asyncio.run(seen())
    actors = ["actor_ref", "actor_ref-1", "actor_ref-2", "actor_ref-3"]
    assert list(found) == [*actors, "rollout-0", "rollout-1", "reward"]
    first, second = found["actor_ref"][0], found["rollout-0"][0]
    assert first != second
    assert {name: node for name, (node, _) in found.items()} == {
        **dict.fromkeys([*actors, "reward"], first),
        **dict.fromkeys(["rollout-0", "rollout-1"], second),
    }
    assert found["reward"][1] == "", "without the variable it would see all GPUs"
    seen_there = {node: list[str]() for node in (first, second)}
    for node, devices in found.values():
        seen_there[node] += devices.split(",") if devices else []
    assert {len(found[name][1].split(",")) for name in actors} == {1}
    assert {len(found[name][1].split(",")) for name in ("rollout-0", "rollout-1")} == {2}
    assert [sorted(devices) for devices in seen_there.values()] == [["0", "1", "2", "3"]] * 2
    assert said[:2] == [
        "wanted: host 1: 4 GPUs, 2.5 CPUs (actor_ref, actor_ref-1, actor_ref-2, actor_ref-3, reward)",
        "wanted: host 2: 4 GPUs, 2 CPUs (rollout-0, rollout-1)",
    ]
    assert [line.rpartition(": ")[2] for line in said[2:]] == ["4 GPUs, 4 CPUs"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.n_gpus_per_node=5", "fsdp.world_size=5"], r"no node for host 1: 5 GPUs, .*\(actor_ref, .*lower trainer\.n_gpus_per_node"),
        (["trainer.nnodes=3", "fsdp.world_size=9"], r"needs 3 hosts .* no node for host 3: 3 GPUs, .*\(actor_ref-8, rollout-0, rollout-1\)"),
        (["ray.cpus_per_worker=3"], r"no node for host 1: 3 GPUs, 12 CPUs .*lower ray\.cpus_per_worker\."),
    ],
)  # fmt: skip
def test_a_cluster_that_is_too_small_is_refused_with_the_missing_bundle(pool_of, overrides, words):
    pool = pool_of(*overrides)
    with pytest.raises(ConfigError, match=words):
        asyncio.run(pool.require_resources(lambda _: None))
    assert pool.processes == []


@pytest.mark.slow
def test_gpus_that_other_jobs_hold_are_waited_for_and_then_named(cluster):
    del cluster
    bundles = [HostBundle(number, ("actor",), 3, 1.0) for number in (1, 2)]

    async def body():
        first, second = HostGroup(bundles), HostGroup(bundles)
        await first.open()
        with pytest.raises(
            WorkerError, match=r"not free within 1 s: host 1: 3 GPUs.* 1 GPU, 3 CPUs.* free\. Stop other jobs"
        ):
            await second.open(wait_s=1)
        first.close()
        await second.open()
        second.close()

    asyncio.run(body())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "words"), [(GPUS, r"no node for host 3: 1 GPU, .*\(actor_ref-8\)"), (ALL_GPUS, r"fsdp\.device")]
)
def test_a_node_that_joins_is_waited_for(nodes, pool_of, gpus, words):
    from polling import until_async  # here for the reason given above

    settings = f"trainer.n_gpus_per_node={gpus}", "fsdp.device=cuda", "fsdp.world_size=9", "rollout.device=cpu"
    pool, said = pool_of("trainer.nnodes=3", *settings), list[str]()
    with pytest.raises(ConfigError, match=words):
        asyncio.run(pool.require_resources(said.append, nodes_s=0.5))
    (waits,) = [line for line in said if "waits" in line]
    assert re.search(r"^the run waits up to 0\.5 s \(ray\.start_timeout_s\) for a node to join: .*" + words, waits)
    said.clear()

    async def joined():
        waiting = asyncio.create_task(pool.require_resources(said.append, nodes_s=400))
        await until_async(lambda: asyncio.sleep(0, any("waits up to 400 s" in line for line in said)), "it waits")
        node = nodes.add_node(object_store_memory=80 << 20, **NODE)
        await waiting
        pool.close()
        nodes.remove_node(node)

    asyncio.run(joined())
    assert [line.rpartition(": ")[2] for line in said if line.startswith("node ")][-3:] == ["4 GPUs, 4 CPUs"] * 3


@pytest.mark.slow
def test_a_node_that_ends_before_it_is_asked_is_not_waited_for(cluster, monkeypatch):
    """Ray lists a lost node as alive until it misses its heartbeats."""
    del cluster
    assert asyncio.run(host_group.require_equal_versions())
    alive = host_group._alive()
    monkeypatch.setattr(host_group, "_alive", lambda: alive | {"ab" * 28: "10.0.0.9"})
    assert not asyncio.run(host_group.require_equal_versions())


@pytest.mark.slow
def test_the_app_refuses_a_cluster_that_is_too_small_before_a_process_starts(cluster, base_model, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, str(Path(__file__).parents[3] / "apps" / "ppo"), *TWO, f"ray.address={cluster}"),
            *(f"model.path={base_model}", f"trainer.output_dir={tmp_path / 'outputs'}", "fsdp.world_size=9"),
            *("fsdp.device=cuda", "rollout.device=cpu", "transfer_queue.listen=127.0.0.1", "trainer.nnodes=3"),
            *("checkpoint_engine.backend=tcp",),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "the Ray cluster has no node for host 3: 1 GPU, 0.5 CPUs (actor_ref-8)" in done.stderr
    assert "Add nodes, or lower trainer.nnodes." in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "outputs").glob("*"))
