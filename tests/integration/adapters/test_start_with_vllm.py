"""A run that starts from an adapter, whose responses vLLM generates, on CPU.

Needs vLLM; see CONTRIBUTING for its environment.
"""

from __future__ import annotations

import pytest
from written_adapters import write_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
VLLM = ("rollout.name=vllm", "rollout.kv_cache_mb=64", "rollout.max_batch_size=64", "ray.start_timeout_s=400")


@pytest.fixture(scope="module")
def adapter(base_model, tmp_path_factory):
    """A LoRA adapter of the demo model that peft wrote, which changes its log-probs."""
    return write_adapter(base_model, tmp_path_factory.mktemp("adapter"), std=0.1)


def test_vllm_generates_with_the_given_adapter_from_the_first_step(app, adapter):
    """Its log-probs are those of the trainer, whose divergence from the base shows the adapter."""
    start = (f"lora.adapter_path={adapter}", "trainer.val_before_train=false", "trainer.test_freq=0")
    reads = ("actor.use_kl_loss=true", "trainer.total_training_steps=1", "actor.optim.lr=1e-6")
    done = app(*VLLM, *start, *reads, timeout=550)
    assert done.code == 0, done.err
    (trained,) = [step for step in done.metrics if step["step"]]
    assert trained["training/rollout_log_probs_diff_max"] < 1e-3
    assert trained["actor/ref_kl"] > 1e-2
