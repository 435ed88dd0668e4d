"""A run over two nodes of a Ray cluster learns what one host does, bit for bit.

Rows go through the data plane's network and weights through TCP, without shared memory; the ranks
of the model meet through TCP either way.
"""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file
from two_nodes import two_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANKS = (
    *("trainer.deterministic=true", "trainer.threads_per_worker=1", "model_engine=fsdp", "fsdp.world_size=2"),
    *("fsdp.device=cpu", "placement=actor+ref", "rollout.num_workers=2", "actor.use_kl_loss=true"),
    *("actor.optim.lr=1e-3", "trainer.val_before_train=false"),
)
NETWORK = (
    *("trainer.nnodes=2", "transfer_queue.listen=127.0.0.1", "transfer_queue.shared_memory=false"),
    *("checkpoint_engine.backend=tcp",),
)


@pytest.fixture(scope="module")
def cluster():
    with two_nodes(num_cpus=2) as address:
        yield address


def test_two_nodes_learn_what_one_host_does(app, cluster, base_model):
    weights = {}
    for name, more in (("one", ()), ("two", (*NETWORK, f"ray.address={cluster}"))):
        done = app(*RANKS, f"trainer.run_name={name}", *more)
        assert done.code == 0, done.err
        if more:
            assert "wanted: host 1: 0 GPUs, 0 CPUs (actor_ref, rollout-0, reward)" in done.out
            assert "wanted: host 2: 0 GPUs, 0 CPUs (actor_ref-1, rollout-1)" in done.out
        weights[name] = load_file(done.folder.parent / name / "checkpoint" / "model.safetensors")
    before = load_file(base_model / "model.safetensors")
    assert weights["one"].keys() == weights["two"].keys() == before.keys()
    assert any((value != before[name]).any() for name, value in weights["one"].items())
    for name, value in weights["one"].items():
        np.testing.assert_array_equal(weights["two"][name], value, err_msg=name)
