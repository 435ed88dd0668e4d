"""Which processes of a run share a host, and which clusters are too small for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rl_app_ppo.config import rollout_engines
from rl_app_ppo.config.devices import host_bundles, plan_processes
from rl_app_ppo.config.hosts import HostBundle, NodeResources, match_nodes
from rl_app_ppo.config.loading import load_config
from rl_protocol import ConfigError

TWO = ("trainer.nnodes=2", "model_engine=fsdp", "placement=actor+ref")
VLLM = ("rollout.name=vllm", "rollout.tensor_model_parallel_size=2")


@pytest.fixture(autouse=True)
def vllm_for_gpus(monkeypatch):
    monkeypatch.setattr(rollout_engines, "require_vllm", lambda: SimpleNamespace(device="cuda"))


def hosts(gpus, *overrides):
    """Names of the processes by host."""
    planned = plan_processes(load_config(overrides), gpus)
    return [bundle.processes for bundle in host_bundles(planned, [0.0] * len(planned))]


def test_gpus_fill_one_host_after_the_other_and_a_replica_stays_on_one():
    """Three ranks leave one GPU of four on the first host, too few for a replica of two."""
    planned = hosts(4, *TWO, *VLLM, "fsdp.world_size=3", "rollout.num_workers=2")
    assert planned == [("actor_ref", "actor_ref-1", "actor_ref-2", "reward"), ("rollout-0", "rollout-1")]
    planned = hosts(4, *TWO, "fsdp.world_size=6", "rollout.num_workers=2")
    first, second = [f"actor_ref-{i}" for i in range(1, 4)], ["actor_ref-4", "actor_ref-5"]
    assert planned == [("actor_ref", *first, "reward"), (*second, "rollout-0", "rollout-1")]


def test_a_replica_is_on_the_host_of_the_ranks_whose_gpus_it_uses():
    shared = (*TWO, "rollout.name=vllm", "rollout.share_gpus=true", "fsdp.world_size=4")
    assert hosts(2, *shared) == [
        ("actor_ref", "actor_ref-1", "rollout-0", "rollout-1", "reward"),
        ("actor_ref-2", "actor_ref-3", "rollout-2", "rollout-3"),
    ]
    two = "rollout.tensor_model_parallel_size=2"
    with pytest.raises(
        ConfigError,
        match=r"rollout-1 needs the GPUs of actor_ref-2, actor_ref-3, which are on several hosts\. Set rollout\.tens",
    ):
        hosts(3, *shared, two)


def test_tensor_parallel_ranks_of_megatron_are_on_one_host():
    sizes = (
        "trainer.nnodes=2",
        "model_engine=megatron",
        "placement=actor+ref",
        "megatron.tensor_model_parallel_size=2",
    )
    planned = hosts(3, *sizes, "megatron.world_size=4", "rollout.device=cpu", "rollout.num_workers=1")
    assert planned == [("actor_ref", "actor_ref-1", "rollout-0", "reward"), ("actor_ref-2", "actor_ref-3")]


def test_ranks_on_the_cpu_are_spread_evenly():
    planned = hosts(0, *TWO, "fsdp.world_size=4", "rollout.num_workers=2")
    assert planned == [
        ("actor_ref", "actor_ref-1", "rollout-0", "reward"),
        ("actor_ref-2", "actor_ref-3", "rollout-1"),
    ]


def test_hosts_without_a_process_are_not_asked_for():
    config = load_config([*TWO[1:], "trainer.nnodes=4", "fsdp.world_size=2", "rollout.num_workers=1"])
    planned = plan_processes(config, 0)
    assert {process.name: process.host for process in planned} == {
        "actor_ref": 0, "actor_ref-1": 1, "rollout-0": 0, "reward": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "overrides", "words"),
    [
        (4, ["fsdp.world_size=7", *VLLM], r"need 11 GPUs of 2 hosts \(trainer\.nnodes\) .*4 can .* for rollout-0\. Lower .*or raise trainer\.nnodes"),
        (1, [*VLLM, "trainer.n_gpus_per_node=1"], r"1 can be used on each \(trainer\.n_gpus_per_node\): not enough are left for rollout-0"),
        (1, ["model_engine=megatron", "megatron.tensor_model_parallel_size=2"], r"for actor_ref and the 1 rank on its host\. Lower mega"),
    ],
)  # fmt: skip
def test_too_few_gpus_of_several_hosts_are_refused_with_the_process_and_the_keys(gpus, overrides, words):
    with pytest.raises(ConfigError, match=words):
        hosts(gpus, *TWO, *overrides)


def bundle(number, gpus, cpus):
    return HostBundle(number, (f"actor-{number}",), gpus, cpus)


def test_hosts_are_matched_to_nodes_whatever_their_order():
    """The first bundle fits both nodes, the second the first node alone."""
    nodes = [NodeResources("10.0.0.1", 8, 64), NodeResources("10.0.0.2", 8, 4)]
    match_nodes([bundle(1, 4, 4), bundle(2, 8, 32)], nodes)
    match_nodes([bundle(1, 0, 0.5)], nodes)


@pytest.mark.parametrize(
    ("bundles", "words"),
    [
        ([bundle(1, 8, 4), bundle(2, 8, 32)], r"no node for host 2: 8 GPUs, 32 CPUs \(actor-2\)\..*lower trainer\.n_gpus_per_node or ray\.cpus_"),
        ([bundle(1, 9, 0)], r"no node for host 1: 9 GPUs.*10\.0\.0\.2: 4 GPUs, 4 CPUs\. Add nodes, or lower trainer\.n_gpus_per_node\."),
        ([bundle(1, 1, 65)], r"no node for host 1: 1 GPU, 65 CPUs .*or lower ray\.cpus_per_worker\."),
        ([bundle(i, 1, 1) for i in (1, 2, 3)], r"needs 3 hosts \(trainer\.nnodes\), .*no node for host 3.* or lower trainer\.nnodes\."),
    ],
)  # fmt: skip
def test_a_cluster_that_is_too_small_is_refused_with_the_host_that_has_no_node(bundles, words):
    with pytest.raises(ConfigError, match=words):
        match_nodes(bundles, [NodeResources("10.0.0.1", 8, 64), NodeResources("10.0.0.2", 4, 4)])


def test_a_node_without_cpus_takes_no_processes():
    """As the head of a KubeRay cluster; Ray reserves a part of a CPU for each host."""
    head, worker = NodeResources("10.0.0.1", 0, 0), NodeResources("10.0.0.2", 0, 4)
    match_nodes([bundle(1, 0, 0)], [head, worker])
    with pytest.raises(
        ConfigError, match=r"no node for host 2: 0 GPUs, 0 CPUs .* Add nodes, or lower trainer\.nnodes\."
    ):
        match_nodes([bundle(1, 0, 0), bundle(2, 0, 0)], [head, worker])
