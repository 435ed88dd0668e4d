"""The app with vLLM as its rollout engine, on CPU. Runs where vLLM is installed (CONTRIBUTING says how)."""

from __future__ import annotations

import uuid

import psutil
import pytest

from .conftest import marked, shared_memory

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def mark():
    """As for other runs, but for the semaphore of vLLM's own, which a process that is killed can't unlink (32 bytes)."""
    value, memory = uuid.uuid4().hex, shared_memory()
    yield value
    alive = psutil.wait_procs(marked(value), timeout=15)[1]
    assert not alive, [process.cmdline() for process in alive]
    assert all(name.startswith("sem.mp-") for name in shared_memory() - memory)


def test_the_app_trains_with_vllm(app):
    done = app(
        "rollout.name=vllm",
        "rollout.num_workers=1",
        "rollout.kv_cache_mb=64",
        "rollout.max_batch_size=64",
        "trainer.total_training_steps=3",
        "ray.start_timeout_s=400",
        timeout=550,
    )
    assert done.code == 0, done.err
    trained = done.metrics[1:]
    assert [m["weight_sync/version"] for m in trained] == [1, 2, 3]
    assert [m["training/policy_lag"] for m in trained] == [0, 0, 0]
    # vLLM's log-probs under the weights of the last sync are the trainer's under its own
    assert max(m["training/rollout_log_probs_diff_max"] for m in trained) < 1e-3
    assert all(m["actor/grad_norm"] > 0 for m in trained)
