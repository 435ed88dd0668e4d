"""vLLM on CPU with tiny models that see images: run with `-m vllm` in its environment."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rl_protocol import RolloutError, WeightSyncError
from rl_protocol.ports import GenerationRequest, ImageInput, SamplingParams
from rl_rollout_vllm import VLLMConfig, VLLMRolloutEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

PIECE, VIDEO = 3, 32
TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def folder(request, make_vision_model):
    return make_vision_model(request.param, hidden=64, heads=2)


@pytest.fixture(scope="module")
def engine(folder):
    config = VLLMConfig(
        model_path=str(folder),
        max_num_seqs=16,
        kv_cache_bytes=64 << 20,
        bucket_bytes=16 << 10,
        call_timeout_s=120.0,
        logprobs_mode="raw_logprobs",
    )
    engine = VLLMRolloutEngine(config)
    yield engine
    engine.close()


def image(seed, height, width):
    """An image of noise, as patches of 4 x 4 pixels in 2 equal frames."""
    patches = np.random.default_rng(seed).normal(size=(height * width, 3 * 2 * 4 * 4))
    return ImageInput(patches.astype(np.float32), (1, height, width))


def prompt(uid, images, session=0):
    pieces = [token for one in images for token in (2, *[PIECE] * (len(one.pixel_values) // 4), 4, 9)]
    return GenerationRequest(uid=uid, session=session, prompt_ids=(5, 10, *pieces, 11, 6), images=tuple(images))


SMALL, OTHER, WIDE = image(0, 4, 4), image(1, 4, 4), image(2, 2, 6)
REQUESTS = [
    prompt("one", [SMALL]),
    prompt("other", [OTHER]),
    prompt("two", [WIDE, SMALL]),
    prompt("text", []),
    prompt("again", [SMALL], session=1),
]


def transformers_model(folder, seed=None):
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder).float().eval()
    if seed is not None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def reference_log_probs(model, request, response):
    """Log-probs of the response by transformers."""
    import torch

    ids = torch.tensor([[*request.prompt_ids, *response]])
    seen = {}
    if request.images:
        seen = {
            "pixel_values": torch.from_numpy(np.concatenate([one.pixel_values for one in request.images])),
            "image_grid_thw": torch.tensor([one.grid_thw for one in request.images]),
            "mm_token_type_ids": (ids == PIECE).long(),
        }
    with torch.no_grad():
        log_probs = torch.log_softmax(model(input_ids=ids, **seen).logits[0].float(), dim=-1)
    start = len(request.prompt_ids) - 1
    return [log_probs[start + i, token].item() for i, token in enumerate(response)]


def generate(engine, requests=REQUESTS, **params):
    return asyncio.run(
        engine.generate(requests, SamplingParams(**{"max_new_tokens": 12, "ignore_eos": True, **params}))
    )


def assert_as_transformers(engine, model):
    made = generate(engine)
    for request, one in zip(REQUESTS, made, strict=True):
        assert one.log_probs == pytest.approx(
            reference_log_probs(model, request, one.response_ids), rel=TOLERANCE, abs=TOLERANCE
        )
    return made


def test_log_probs_are_those_of_transformers_and_no_placeholder_is_generated(engine, folder):
    made = assert_as_transformers(engine, transformers_model(folder))
    more = generate(engine, [prompt(f"p{i}", [SMALL]) for i in range(16)])
    assert not {PIECE, VIDEO} & {token for one in [*made, *more] for token in one.response_ids}


def test_images_of_equal_size_are_told_apart(engine):
    """Their prompts have equal tokens: cached keys and values of one must not serve the other."""
    first, other = generate(engine, [REQUESTS[0], prompt("one", [OTHER])], temperature=0.0)
    again, *_ = generate(engine, [REQUESTS[0]], temperature=0.0)
    assert first.log_probs != pytest.approx(other.log_probs, rel=TOLERANCE)
    assert again.log_probs == pytest.approx(first.log_probs, rel=TOLERANCE)


def test_new_weights_of_language_and_vision_parts_are_used(engine, folder):
    from rl_protocol.torch import to_weight

    model = transformers_model(folder, seed=7)
    weights = [to_weight(name, tensor) for name, tensor in model.state_dict().items()]
    before = generate(engine)
    with pytest.raises(WeightSyncError, match=r"missing \['model\.visual\."):
        engine.load_weights([weight for weight in weights if ".visual." not in weight.name], engine.weight_version + 1)
    engine.load_weights(weights, engine.weight_version + 1)
    made = assert_as_transformers(engine, model)
    assert made[0].log_probs != pytest.approx(before[0].log_probs, rel=TOLERANCE)


def test_a_prompt_without_the_tokens_of_its_image_is_refused(engine):
    wrong = GenerationRequest(uid="p", session=0, prompt_ids=(5, 2, PIECE, 4, 6), images=(SMALL,))
    with pytest.raises(RolloutError, match="the prompt has 1 image token, and its 1 image must have 4"):
        generate(engine, [wrong])
