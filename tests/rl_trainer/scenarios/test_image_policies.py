"""Vision models: rollout and trainer agree on log-probs in any batch, and gradients flow."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from relative import apart
from replay_buffers import leased
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from rl_protocol import BatchData, BatchError, ConfigError, RolloutError, ragged
from rl_protocol.ports import GenerationRequest, ImageInput, SamplingParams
from rl_protocol.rl_columns import PROMPT_SCHEMA
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import ActorConfig, CriticConfig, LoraConfig, PromptRow, RolloutWorker
from rl_trainer.backends.token_batch import packed_tokens, token_batch
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.config import OptimConfig
from rl_trainer.config.lora import LINEAR
from rl_trainer.data.image_columns import image_columns
from rl_trainer.data.images import Vision
from rl_trainer.rollout.hf_engine import HFRolloutEngine
from rl_trainer.rollout.image_reader import FolderImageReader
from rl_trainer.workers.messages import Partition, RolloutCall

pytestmark = pytest.mark.numeric

PIECE, VIDEO = 3, 32
SIZES = ([(16, 8)], [], [(16, 16), (24, 8)], [(32, 32)])
"""Image sizes of four prompts; TOKENS holds the number of tokens of each image."""
TOKENS = ((2,), (), (4, 3), (16,))


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def model(request, make_vision_model):
    return make_vision_model(request.param)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Prompts with images of noise."""
    folder, rng, rows = tmp_path_factory.mktemp("images"), np.random.default_rng(0), []
    for i, (sizes, counts) in enumerate(zip(SIZES, TOKENS, strict=True)):
        paths = [str(folder / f"{i}-{k}.png") for k in range(len(sizes))]
        for path, (width, height) in zip(paths, sizes, strict=True):
            Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(path)
        pieces = [token for count in counts for token in (2, *[PIECE] * count, 4, 9)]
        ids = (5, 10 + i, *pieces, 11, 6)
        rows.append(PromptRow(prompt_ids=ids, data_source="noise", ground_truth="", images=tuple(paths)))
    return rows


def reader(model):
    return FolderImageReader(model, Vision.load(model))


def requests(model, rows, sessions=2):
    read = reader(model)
    return [
        GenerationRequest(uid=f"p{i}", session=s, prompt_ids=row.prompt_ids, images=read(row.images, row.prompt_ids))
        for i, row in enumerate(rows)
        for s in range(sessions)
    ]


def as_batch(asked, generations, **more):
    columns = {
        "prompts": ragged([one.prompt_ids for one in asked], "int64"),
        "responses": ragged([one.response_ids for one in generations], "int64"),
        **image_columns([one.images for one in asked]),
    }
    return BatchData({**columns, **more})


def blind(asked, generations):
    """The same batch with black images."""
    dark = [[ImageInput(one.pixel_values * 0, one.grid_thw) for one in request.images] for request in asked]
    return as_batch(asked, generations, **image_columns(dark))


SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.8, seed=5)


def log_probs_of(generations):
    return np.concatenate([one.log_probs for one in generations])


def generate(engine, asked, sampling=SAMPLING):
    return asyncio.run(engine.generate(asked, sampling))


@pytest.mark.parametrize("packed", [False, True])
def test_log_probs_of_the_rollout_are_those_of_the_trainer(model, prompts, packed):
    config = ActorConfig(use_remove_padding=packed)
    asked = requests(model, prompts)
    made = generate(HFRolloutEngine(model), asked)
    # other batches than the engine's, padded on the other side
    policy = TorchPolicyBackend(model, config, options=PolicyOptions(forward_rows=3))
    found = policy.compute_log_probs(as_batch(asked, made), temperature=0.8)["log_probs"]
    assert apart(found.values, log_probs_of(made)) < 1e-5
    other = policy.compute_log_probs(blind(asked, made), temperature=0.8)["log_probs"]
    changes = [apart(other.row(i), found.row(i), found.values) for i in range(len(asked))]
    # the result depends on the pixels
    assert min(changes[i] for i, one in enumerate(asked) if one.images) > 1e-3
    assert max(changes[i] for i, one in enumerate(asked) if not one.images) < 1e-5


def test_it_is_what_plain_transformers_computes_without_padding(model, prompts):
    asked = requests(model, prompts, sessions=1)
    made = generate(HFRolloutEngine(model), asked)
    plain, processor = (
        AutoModelForImageTextToText.from_pretrained(model).eval(),
        AutoImageProcessor.from_pretrained(model),
    )
    want = list[float]()
    for row, one in zip(prompts, made, strict=True):
        ids = torch.tensor([[*row.prompt_ids, *one.response_ids]])
        more = {"mm_token_type_ids": (ids == PIECE).int()}
        if row.images:
            more |= processor(images=[Image.open(path).copy() for path in row.images], return_tensors="pt")
        with torch.no_grad():
            logits = plain(input_ids=ids, **more).logits[0, len(row.prompt_ids) - 1 : -1] / 0.8
        want += logits.log_softmax(-1)[range(len(one.response_ids)), list(one.response_ids)].tolist()
    assert apart(log_probs_of(made), want) < 1e-5


def test_what_is_generated_depends_on_no_batch(model, prompts):
    asked = requests(model, prompts)
    engine = HFRolloutEngine(model)
    together = generate(engine, asked)
    alone = [generate(engine, [one])[0] for one in reversed(asked)]
    assert [one.response_ids for one in together] == [one.response_ids for one in reversed(alone)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_stands_for_an_image_is_never_said(model, prompts, temperature):
    engine = HFRolloutEngine(model)
    with torch.no_grad():
        engine._model.lm_head.weight[[PIECE, VIDEO]] *= 100  # unmasked, these tokens would win
    asked = requests(model, prompts, sessions=4)
    made = generate(engine, asked, SamplingParams(max_new_tokens=8, temperature=temperature, ignore_eos=True))
    assert not {PIECE, VIDEO} & {token for one in made for token in one.response_ids}
    assert all(math.isfinite(value) for one in made for value in one.log_probs)


def test_prompt_and_images_must_belong_together(model, prompts, model_path):
    (first, *_) = requests(model, prompts)
    bare = GenerationRequest(uid="p", session=0, prompt_ids=first.prompt_ids)
    with pytest.raises(RolloutError, match="'p' has 2 image tokens, and its 0 images must have 0"):
        generate(HFRolloutEngine(model), [bare])
    shown = GenerationRequest(uid="p", session=0, prompt_ids=(3, 4), images=first.images)
    with pytest.raises(RolloutError, match=r"has 0 image tokens, and its 1 image must have .* only a model that sees"):
        generate(HFRolloutEngine(model_path), [shown])
    with pytest.raises(
        RolloutError, match=r"3-0\.png are 16 tokens, and the prompt was made for 2: a file has changed since"
    ):
        reader(model)(prompts[3].images, first.prompt_ids)
    with pytest.raises(RolloutError, match=r"gone\.png can't be read: .*No such file"):
        reader(model)(["/gone.png"], first.prompt_ids)
    said = as_batch([first], [type("G", (), {"response_ids": (8, PIECE)})])
    with pytest.raises(BatchError, match="Row 0 has the image token 3 in its response"):
        TorchPolicyBackend(model, None).compute_log_probs(said, temperature=1.0)


def test_rows_share_a_prompt_only_with_its_images(model, prompts):
    """Packed, equal prompts are computed once; two of these have equal tokens and other pixels."""
    first, *_ = requests(model, prompts, sessions=1)
    black = tuple(ImageInput(one.pixel_values * 0, one.grid_thw) for one in first.images)
    dark = GenerationRequest(uid="dark", session=0, prompt_ids=first.prompt_ids, images=black)
    asked = [first, dark, first, dark]
    made = generate(HFRolloutEngine(model), [first] * 4)
    batch = as_batch(asked, made)
    packed, padded = (
        TorchPolicyBackend(model, ActorConfig(use_remove_padding=joined)).compute_log_probs(batch, temperature=0.8)
        for joined in (True, False)
    )
    rows = packed["log_probs"].rows()
    assert apart(packed["log_probs"].values, padded["log_probs"].values) < 1e-5
    assert apart(rows[0], rows[2]) < 1e-5 < 1e-3 < apart(rows[0], rows[1])
    tokens = packed_tokens(batch)
    assert (tokens.at[0] == tokens.at[2])[: len(first.prompt_ids)].all()
    assert not (tokens.at[0] == tokens.at[1])[: len(first.prompt_ids)].any()


@pytest.mark.parametrize("packed", [False, True])
def test_an_update_trains_the_part_that_sees_and_can_be_saved(model, prompts, tmp_path, packed):
    asked = requests(model, prompts, sessions=1)
    made = generate(HFRolloutEngine(model), asked)
    lengths = [len(one.response_ids) for one in made]
    settings = {"ppo_mini_batch_size": 4, "ppo_micro_batch_size": 3, "optim": OptimConfig(lr=1e-2)}
    policy = TorchPolicyBackend(model, ActorConfig(use_remove_padding=packed, **settings))
    before = {weight.name: weight.data.copy() for weight in policy.named_weights()}
    old = policy.compute_log_probs(as_batch(asked, made), temperature=0.8)["log_probs"]
    more = {
        "response_mask": ragged([[True] * n for n in lengths], "bool"),
        "old_log_probs": old,
        "advantages": ragged([[1.0] * n for n in lengths], "float32"),
    }
    metrics = policy.update(as_batch(asked, made, **more), temperature=0.8)
    assert math.isfinite(metrics["actor/grad_norm"])
    after = {weight.name: weight.data for weight in policy.named_weights()}
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert any(".visual." in name for name in changed)
    assert any(".language_model." in name for name in changed)
    policy.save_pretrained(tmp_path / "saved")
    again = TorchPolicyBackend(tmp_path / "saved", None).compute_log_probs(as_batch(asked, made), temperature=0.8)
    now = policy.compute_log_probs(as_batch(asked, made), temperature=0.8)
    assert apart(again["log_probs"].values, now["log_probs"].values) < 1e-5
    # the image processor is saved with it
    assert reader(tmp_path / "saved")(prompts[0].images, prompts[0].prompt_ids)
    engine = HFRolloutEngine(model)
    engine.load_weights(policy.named_weights(), 1)  # the engine takes all weights
    fresh = generate(engine, asked)
    found = policy.compute_log_probs(as_batch(asked, fresh), temperature=0.8)["log_probs"]
    assert apart(found.values, log_probs_of(fresh)) < 1e-5


@pytest.mark.parametrize(("dora", "packed"), [(False, False), (True, False), (False, True)])
def test_adapters_alone_are_trained_sent_and_saved(model, prompts, tmp_path, dora, packed):
    lora = LoraConfig(rank=2, alpha=4, use_dora=dora)
    asked, engine = requests(model, prompts, sessions=1), HFRolloutEngine(model, lora=lora)
    made = generate(engine, asked)
    settings = {"ppo_mini_batch_size": 4, "ppo_micro_batch_size": 3, "optim": OptimConfig(lr=1e-2)}
    policy = TorchPolicyBackend(model, ActorConfig(use_remove_padding=packed, **settings), lora=lora)
    old = policy.compute_log_probs(as_batch(asked, made), temperature=0.8)["log_probs"]
    more = {
        "response_mask": ragged([[True] * len(one.response_ids) for one in made], "bool"),
        "old_log_probs": old,
        "advantages": ragged([[1.0] * len(one.response_ids) for one in made], "float32"),
    }
    before = {weight.name: weight.data.copy() for weight in policy.named_weights()}
    for _ in range(2):
        policy.update(as_batch(asked, made, **more), temperature=0.8)
    after = {weight.name: weight.data for weight in policy.named_weights()}
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed
    assert all(name.split(".")[-2] in LINEAR for name in changed)
    base = policy.compute_reference_log_probs(as_batch(asked, made), temperature=0.8)["log_probs"]
    assert apart(base.values, old.values) < 1e-5
    engine.load_adapter(list(policy.adapter_weights()), 1)
    fresh = generate(engine, asked)
    now = policy.compute_log_probs(as_batch(asked, fresh), temperature=0.8)["log_probs"]
    assert apart(now.values, log_probs_of(fresh)) < 1e-5
    policy.save_pretrained(tmp_path / "saved")
    again = TorchPolicyBackend(model, None, lora=replace(lora, adapter_path=str(tmp_path / "saved")))
    found = again.compute_log_probs(as_batch(asked, fresh), temperature=0.8)["log_probs"]
    assert apart(found.values, now.values) < 1e-5
    assert_critic_starts_from(tmp_path / "saved", model, lora, as_batch(asked, fresh))


def assert_critic_starts_from(folder, model, lora, batch):
    """Check that a critic has the adapter of a policy, as peft reads it, and a head of zeros."""
    lora = replace(lora, adapter_path=str(folder))
    critic = TorchCriticBackend(model, CriticConfig(use_lora=True), lora=lora, rollout_n=1, seed=0)
    assert not critic.compute_values(batch)["values"].values.any()
    torch.nn.init.ones_(critic._model.head.weight)
    theirs = peft.PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(model), folder).eval()
    tokens = token_batch(batch, 0, image_token=PIECE, pieces=4)
    with torch.no_grad():
        hidden = tokens.read(theirs.base_model.model.model(**tokens.inputs).last_hidden_state)
    assert apart(critic.compute_values(batch)["values"].values, hidden.sum(-1)) < 1e-5


@pytest.mark.parametrize("packed", [False, True])
def test_a_blank_image_changes_no_log_prob(model, prompts, packed):
    """Ranks run the part that sees together, so a batch without images gets a blank one."""
    text = [one for one in requests(model, prompts, sessions=2) if not one.images]
    batch = as_batch(text, generate(HFRolloutEngine(model), text))
    policy = TorchPolicyBackend(model, ActorConfig(use_remove_padding=packed))
    expected = policy.compute_log_probs(batch, temperature=0.8)["log_probs"].values
    seen = list[int]()
    policy._model.model.visual.register_forward_hook(lambda *_: seen.append(1))
    assert policy._facts.blank(1) == 0
    tokens = token_batch(batch, 0, packed=packed, image_token=PIECE, pieces=4, blank=policy._facts.blank(2))
    with torch.no_grad():
        scores = tokens.read(policy._model(**tokens.inputs, use_cache=False).logits) / 0.8
    found = scores.log_softmax(-1).gather(-1, tokens.targets[:, None])[:, 0]
    assert seen == [1]
    assert apart(found, expected) < 1e-5


@pytest.mark.parametrize("packed", [False, True])
def test_a_critic_sees_them_too(model, prompts, packed):
    asked = requests(model, prompts, sessions=1)
    made = generate(HFRolloutEngine(model), asked)
    lengths = [len(one.response_ids) for one in made]
    settings = {"ppo_mini_batch_size": 4, "ppo_micro_batch_size": 3, "cliprange_value": 9}
    config = CriticConfig(use_remove_padding=packed, optim=OptimConfig(lr=1e-2), **settings)
    critic = TorchCriticBackend(model, config, rollout_n=1, seed=0)
    first = critic.compute_values(as_batch(asked, made))["values"]
    assert not first.values.any()
    wanted = [[float(i)] * n for i, n in enumerate(lengths)]
    more = {
        "response_mask": ragged([[True] * n for n in lengths], "bool"),
        "values": first,
        "returns": ragged(wanted, "float32"),
    }
    errors = [critic.update(as_batch(asked, made, **more))["critic/vf_loss"] for _ in range(20)]
    assert errors[-1] < errors[0] / 2
    seen, unseen = (critic.compute_values(batch)["values"] for batch in (as_batch(asked, made), blind(asked, made)))
    changes = [apart(unseen.row(i), seen.row(i), seen.values) for i in range(4)]
    assert min(changes[0], *changes[2:]) > 1e-3
    assert changes[1] < 1e-5  # the only row without images


def test_pixels_lie_in_the_row_of_the_prompt_once(model, prompts):
    plane = MemoryDataPlane()
    partition = Partition(name="train", split="train", step=0, n=3, sampling=SAMPLING)
    call = RolloutCall(partition=partition, prompts=leased({f"p{i}": i for i in range(4)}, 3))

    async def rollout(images):
        worker = RolloutWorker(plane, HFRolloutEngine(model), {"train": prompts}, images=images)
        await worker.rollout(call)
        assert len(await plane.list_rows("train")) == 12
        rows = await plane.list_rows("train/prompts")
        return await plane.get(rows, rows.fields), (await plane.list_rows("train")).fields

    data, fields = asyncio.run(rollout(reader(model)))
    PROMPT_SCHEMA.check(data)
    assert data.ragged("image_grids").lengths.tolist() == [1, 0, 2, 1]
    patches = [sum(math.prod(grid) for grid in row.tolist()) for row in data.ragged("image_grids").rows()]
    assert patches == [8, 0, 28, 64]
    assert data.ragged("image_patches").lengths.tolist() == [96 * count for count in patches]
    assert data.objects("extra_info").values()[2] == {"images": list(prompts[2].images)}
    assert "images" not in data.objects("extra_info").values()[1]
    assert "image_patches" not in fields
    with pytest.raises(ConfigError, match="RolloutWorker was created without `images`"):
        asyncio.run(rollout(None))
