"""The transformers rollout engine: exact samples, counter-based seeds, log-probs, weights."""

from __future__ import annotations

import asyncio
import mmap
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from relative import apart
from transformers import AutoModelForCausalLM, GenerationConfig

from rl_protocol import BatchData, RolloutError, WeightSyncError, ragged
from rl_protocol.kept_tokens import KeptTokens
from rl_protocol.ports import GenerationRequest, RolloutEngine, SamplingParams
from rl_protocol.torch import to_weight
from rl_trainer import ActorConfig, LoraConfig, OptimConfig
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.rollout.decoding import DecodingBatch
from rl_trainer.rollout.hf_engine import HFRolloutEngine
from rl_trainer.rollout.sampling import uniforms

pytestmark = pytest.mark.numeric

REQUESTS = [GenerationRequest(uid=f"p{i}", session=0, prompt_ids=(2 + i % 5,) * (1 + i % 4)) for i in range(12)]


@pytest.fixture(scope="module")
def engine(model_path):
    return HFRolloutEngine(model_path, max_batch_size=5)


def generate(engine, requests, **params):
    return asyncio.run(engine.generate(requests, SamplingParams(**{"max_new_tokens": 6, **params})))


def log_probs_of(generations):
    return np.concatenate([one.log_probs for one in generations])


def policy_log_probs(model_path, requests, generations, temperature=1.0, policy=None):
    policy = policy or TorchPolicyBackend(model_path, None)
    data = BatchData(
        {
            "prompts": ragged([r.prompt_ids for r in requests], "int64"),
            "responses": ragged([g.response_ids for g in generations], "int64"),
        }
    )
    return policy.compute_log_probs(data, temperature=temperature).ragged("log_probs").rows()


def test_it_is_a_rollout_engine(engine):
    assert isinstance(engine, RolloutEngine)
    assert engine.weight_version == 0


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_the_trainer_reproduces_the_log_probs(engine, model_path, temperature):
    generations = generate(engine, REQUESTS, temperature=temperature)
    recomputed = policy_log_probs(model_path, REQUESTS, generations, temperature or 1.0)
    assert apart(log_probs_of(generations), np.concatenate(recomputed)) < 1e-5


def test_a_response_does_not_depend_on_its_batch(engine):
    together = generate(engine, REQUESTS)
    alone = [generate(engine, [request])[0] for request in REQUESTS]
    backwards = generate(engine, REQUESTS[::-1])[::-1]
    assert [g.response_ids for g in together] == [g.response_ids for g in alone] == [g.response_ids for g in backwards]


def test_sessions_and_seeds_differ(engine):
    first, second = (GenerationRequest(uid="p", session=s, prompt_ids=(3,)) for s in (0, 1))
    a, b = generate(engine, [first, second], max_new_tokens=20, ignore_eos=True)
    (c,) = generate(engine, [first], max_new_tokens=20, ignore_eos=True, seed=1)
    assert len({a.response_ids, b.response_ids, c.response_ids}) == 3


def test_random_numbers_belong_to_the_response_alone():
    first, second = (GenerationRequest(uid="p", session=s, prompt_ids=(3,)) for s in (0, 1))
    numbers = uniforms(0, [first, second], 1000)
    assert (numbers[0] != numbers[1]).all()
    assert (uniforms(1, [first], 1000) != numbers[0]).all()
    assert (uniforms(0, [second, first], 3) == numbers[::-1, :3]).all()
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert np.square(counts - 200).sum() / 200 < 40  # chi-squared with 9 degrees of freedom; p < 1e-5


def test_samples_follow_the_distribution(engine, model_path):
    """The first tokens of 4000 samples differ from the model's distribution only by chance."""
    requests = [GenerationRequest(uid="p", session=s, prompt_ids=(3, 4)) for s in range(4000)]
    big = HFRolloutEngine(model_path, max_batch_size=4000)
    counts = Counter(g.response_ids[0] for g in generate(big, requests, max_new_tokens=1, temperature=0.7))
    tokens = list(range(14))
    rows = [GenerationRequest(uid="p", session=0, prompt_ids=(3, 4))] * 14
    log_p = policy_log_probs(model_path, rows, [type("G", (), {"response_ids": (t,)})() for t in tokens], 0.7)
    p = np.exp([row[0] for row in log_p])
    assert p.sum() == pytest.approx(1.0, rel=1e-5)
    assert 0.5 * sum(abs(counts[t] / 4000 - p[t]) for t in tokens) < 0.03


def test_top_k_and_top_p_restrict_the_choice(engine):
    request = [GenerationRequest(uid="p", session=s, prompt_ids=(3,)) for s in range(40)]
    (greedy,) = {g.response_ids for g in generate(engine, request, temperature=0.0, max_new_tokens=3)}
    assert {g.response_ids for g in generate(engine, request, top_k=1, max_new_tokens=3)} == {greedy}
    assert {g.response_ids for g in generate(engine, request, top_p=1e-6, max_new_tokens=3)} == {greedy}
    assert len({g.response_ids for g in generate(engine, request, max_new_tokens=3)}) > 5


TRUNCATIONS = [{"top_p": 0.8}, {"top_k": 3}, {"top_p": 0.7, "top_k": 4, "temperature": 0.6}]


def kept_batch(requests, generations):
    """The columns of responses with their kept sets."""
    return BatchData(
        {
            "prompts": ragged([r.prompt_ids for r in requests], "int64"),
            "responses": ragged([g.response_ids for g in generations], "int64"),
            "kept_counts": ragged([g.kept.counts for g in generations], "int32"),
            "kept_words": ragged([g.kept.words for g in generations], "int32"),
        }
    )


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_kept_sets_are_those_of_top_k_and_top_p(engine, model_path, truncation):
    """Against the rule of both on all probabilities, in float64, with the model of transformers."""
    generations = generate(engine, REQUESTS, kept_sets=True, **truncation)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    temperature, expected = truncation.get("temperature", 1.0), list[float]()
    for request, generation in zip(REQUESTS, generations, strict=True):
        ids = [*request.prompt_ids, *generation.response_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(request.prompt_ids) - 1 : -1]
        p = torch.softmax(logits.double() / temperature, -1).numpy()
        excluded = KeptTokens(generation.kept, torch.device("cpu")).excluded(slice(0, len(p)), p.shape[1]).numpy()
        for place, token in enumerate(generation.response_ids):
            order = np.argsort(-p[place])
            best = order[: truncation.get("top_k", len(order))]
            share = p[place][best] / p[place][best].sum()
            needed = int(np.searchsorted(np.cumsum(share), truncation.get("top_p", 1.0))) + 1
            kept = best[:needed]
            assert set(np.flatnonzero(~excluded[place])) == set(kept)
            expected.append(np.log(p[place][token] / p[place][kept].sum()))
    assert len(expected) > 12
    assert apart(log_probs_of(generations), expected) < 1e-5


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_the_trainer_computes_over_the_kept_tokens(engine, model_path, truncation, packed):
    """Without the sets its log-probs are over all tokens, and smaller."""
    generations = generate(engine, REQUESTS, kept_sets=True, **truncation)
    policy = TorchPolicyBackend(model_path, ActorConfig(use_remove_padding=packed))
    batch, temperature = kept_batch(REQUESTS, generations), truncation.get("temperature", 1.0)
    out = policy.compute_log_probs(batch, temperature=temperature)
    over_kept = out.ragged("log_probs").values
    assert apart(over_kept, log_probs_of(generations)) < 1e-5
    tokens = batch.select_fields(["prompts", "responses"])
    over_all = policy.compute_log_probs(tokens, temperature=temperature).ragged("log_probs").values
    gap = over_kept.astype(np.float64) - over_all
    assert (gap > -1e-5).all()
    assert gap.mean() > 0.05
    assert (out.ragged("entropy").values >= -1e-6).all()


def test_without_truncation_there_are_no_kept_sets(engine):
    plain = generate(engine, REQUESTS)
    asked = generate(engine, REQUESTS, kept_sets=True)
    assert [(g.response_ids, g.log_probs, g.kept) for g in asked] == [
        (g.response_ids, g.log_probs, None) for g in plain
    ]
    for params in ({"top_k": 3}, {"top_k": 3, "temperature": 0.0, "kept_sets": True}):
        assert {g.kept for g in generate(engine, REQUESTS, **params)} == {None}


def test_kept_sets_do_not_change_what_is_sampled(engine):
    """The set of a finished response ends with it, also where others in its batch go on."""
    plain = generate(engine, REQUESTS, top_p=0.9, max_new_tokens=30)
    asked = generate(engine, REQUESTS, top_p=0.9, max_new_tokens=30, kept_sets=True)
    assert [g.response_ids for g in asked] == [g.response_ids for g in plain]
    assert len({len(g.response_ids) for g in asked}) > 1
    for generation in asked:
        assert len(generation.kept) == len(generation.response_ids)
        assert generation.kept.contain(generation.response_ids).all()


def test_stopping(engine):
    for generation in generate(engine, REQUESTS, max_new_tokens=30):
        stopped = generation.finish_reason == "stop"
        assert (generation.response_ids[-1] == 1) is stopped
        assert 1 not in generation.response_ids[:-1]
        assert len(generation.response_ids) == len(generation.log_probs)
    for generation in generate(engine, REQUESTS, ignore_eos=True):
        assert len(generation.response_ids) == 6
        assert generation.finish_reason == "length"


def test_a_model_may_have_several_tokens_that_end_a_response(model_path, tmp_path, engine):
    whole = generate(engine, REQUESTS, max_new_tokens=20, ignore_eos=True)
    folder = shutil.copytree(model_path, tmp_path / "model")
    config = GenerationConfig.from_pretrained(folder)
    config.eos_token_id = ends = [config.eos_token_id, whole[0].response_ids[2]]
    config.save_pretrained(folder)
    for cut, one in zip(generate(HFRolloutEngine(folder), REQUESTS, max_new_tokens=20), whole, strict=True):
        first = next((n for n, token in enumerate(one.response_ids, 1) if token in ends), None)
        assert cut.response_ids == one.response_ids[:first]
        assert cut.finish_reason == ("length" if first is None else "stop")


def test_requests_that_cannot_be_served_are_named(engine):
    with pytest.raises(RolloutError, match="'empty' is empty"):
        generate(engine, [GenerationRequest(uid="empty", session=0, prompt_ids=())])
    with pytest.raises(RolloutError, match=r"'long'.*SamplingParams\.max_new_tokens=6.*context of 64"):
        generate(engine, [GenerationRequest(uid="long", session=0, prompt_ids=(2,) * 60)])


def trained(model_path, steps=1):
    policy = TorchPolicyBackend(model_path, ActorConfig(optim=OptimConfig(lr=1e-2), ppo_mini_batch_size=4), seed=0)
    data = BatchData({"prompts": ragged([[2], [3]], "int64"), "responses": ragged([[4, 1], [5, 1]], "int64")})
    columns = {
        "response_mask": ragged([[True] * 2] * 2, "bool"),
        "old_log_probs": policy.compute_log_probs(data, temperature=1.0)["log_probs"],
        "advantages": ragged([[1.0, 1.0], [-1.0, -1.0]], "float32"),
    }
    for _ in range(steps):
        policy.update(BatchData({**data.columns, **columns}), temperature=1.0)
    return policy


def test_new_weights_change_the_log_probs_to_the_trainers(model_path):
    engine, policy = HFRolloutEngine(model_path), trained(model_path)
    before = generate(engine, REQUESTS, temperature=0.0)
    engine.load_weights(list(policy.named_weights()), 7)
    after = generate(engine, REQUESTS, temperature=0.0)
    assert engine.weight_version == 7
    assert {g.weight_version for g in after} == {7}
    assert [g.log_probs for g in before] != [g.log_probs for g in after]
    recomputed = policy_log_probs(model_path, REQUESTS, after, policy=policy)
    assert apart(log_probs_of(after), np.concatenate(recomputed)) < 1e-5


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(model_path):
    engine, policy = HFRolloutEngine(model_path), trained(model_path)
    weights = list(policy.named_weights())
    before = generate(engine, REQUESTS, temperature=0.0)
    wrong_shape = to_weight(weights[0].name, torch.zeros(3))
    for bad, message in (
        (weights[1:], f"missing \\['{weights[0].name}'\\]"),
        ([*weights, to_weight("surprise", torch.zeros(1))], r"unknown \['surprise'\]"),
        ([wrong_shape, *weights[1:]], f"{weights[0].name}.*float32 \\(3,\\)"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            engine.load_weights(bad, 1)
    assert engine.weight_version == 0
    assert generate(engine, REQUESTS, temperature=0.0) == before


def read_only(weights):
    """Copy weights to read-only memory; a process that writes to it is killed."""
    out = []
    for weight in weights:
        with tempfile.TemporaryFile() as file:
            file.write(weight.data.tobytes())
            file.flush()
            memory = mmap.mmap(file.fileno(), weight.nbytes, access=mmap.ACCESS_READ)
        out.append(replace(weight, data=np.frombuffer(memory, np.uint8)))
    return out


def addresses(engine):
    return {tensor.data_ptr() for tensor in engine._model.state_dict().values()}


def test_adopted_weights_are_used_where_they_are_and_never_written(model_path):
    engine, copying = HFRolloutEngine(model_path), HFRolloutEngine(model_path)
    for version, steps in ((3, 1), (4, 2)):
        weights = read_only(trained(model_path, steps).named_weights())
        engine.adopt_weights(weights, version, lambda: None)
        copying.load_weights(weights, version)
        assert addresses(engine) <= {weight.data.ctypes.data for weight in weights}
        assert generate(engine, REQUESTS) == generate(copying, REQUESTS)
        assert engine.weight_version == version
    weights = read_only(trained(model_path, 3).named_weights())
    for _ in range(2):  # after adopted weights, then after loaded ones
        engine.load_weights(weights, 5)
        assert not addresses(engine) & {weight.data.ctypes.data for weight in weights}
    copying.load_weights(weights, 5)
    assert generate(engine, REQUESTS) == generate(copying, REQUESTS)


def test_nothing_is_returned_that_was_made_with_weights_which_were_given_up(model_path):
    engine, gone = HFRolloutEngine(model_path), []

    def watch():
        if gone:
            raise WeightSyncError("Version 2 is not there any more.")

    engine.adopt_weights(read_only(trained(model_path).named_weights()), 2, watch)
    assert generate(engine, REQUESTS)
    gone.append(True)
    with pytest.raises(RolloutError, match=r"with version 2 is dropped.*not there any more"):
        generate(engine, REQUESTS)
    engine.load_weights(list(trained(model_path).named_weights()), 3)
    assert generate(engine, REQUESTS)


def test_weights_that_do_not_fit_are_not_adopted(model_path):
    engine = HFRolloutEngine(model_path)
    before = generate(engine, REQUESTS, temperature=0.0)
    with pytest.raises(WeightSyncError, match="missing"):
        engine.adopt_weights(read_only(trained(model_path).named_weights())[1:], 1, lambda: None)
    assert (engine.weight_version, generate(engine, REQUESTS, temperature=0.0)) == (0, before)


SLEEPS = """
import asyncio, sys
import psutil, torch
from transformers import LlamaConfig, LlamaForCausalLM
from rl_protocol.kept_tokens import KeptTokens
from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_protocol.torch import to_weight
from rl_trainer.rollout.decoding import DecodingBatch
from rl_trainer.rollout.hf_engine import HFRolloutEngine

torch.manual_seed(0)
ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
config = LlamaConfig(vocab_size=64, num_key_value_heads=8, max_position_embeddings=256, **shape, **ends)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
engine = HFRolloutEngine(sys.argv[1])
weights = [to_weight(name, tensor.clone()) for name, tensor in engine._model.state_dict().items()]
engine.load_weights(weights, 1)
requests = [GenerationRequest(uid=f"p{i}", session=0, prompt_ids=(2, 3)) for i in range(64)]
generate = lambda: asyncio.run(engine.generate(requests, SamplingParams(max_new_tokens=16, ignore_eos=True)))
resident = lambda: psutil.Process().memory_info().rss
before = generate()
awake = resident()
asyncio.run(engine.sleep(1))
light = resident()
freed = asyncio.run(engine.sleep(2))
asleep = resident()
asyncio.run(engine.wake("weights"))
engine.load_weights(weights, 2)
asyncio.run(engine.wake("kv_cache"))
same = [g.response_ids for g in generate()] == [g.response_ids for g in before]
print(awake - light, light - asleep, freed, sum(w.data.nbytes for w in weights), same, engine.weight_version)
"""


def test_sleep_gives_the_memory_of_its_weights_back_to_the_system(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SLEEPS, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    caches, released, freed, weights, same, version = done.stdout.split()
    assert int(caches) >= 0
    assert int(freed) == int(weights)
    assert int(released) > 0.9 * int(weights)
    assert (same, version) == ("True", "2")


@pytest.mark.parametrize("kind", ["adopted", "adapters"])
def test_weights_that_are_not_its_own_or_not_sent_again_are_not_dropped(model_path, kind):
    engine = HFRolloutEngine(model_path, lora=LoraConfig(rank=2) if kind == "adapters" else None)
    if kind == "adopted":
        assert engine.capabilities.drops_weights
        engine.adopt_weights([to_weight(*pair) for pair in engine._model.state_dict().items()], 1, lambda: None)
    assert engine.capabilities.sleeps
    assert not engine.capabilities.drops_weights
    expected = generate(engine, REQUESTS)
    assert asyncio.run(engine.sleep(1)) == 0
    with pytest.raises(WeightSyncError, match="can't drop its weights"):
        asyncio.run(engine.sleep(2))
    asyncio.run(engine.wake())
    assert generate(engine, REQUESTS) == expected


def changed(model_path):
    """All weights of the model, a little larger."""
    state = TorchPolicyBackend(model_path, None)
    return [
        to_weight(weight.name, torch.from_numpy(weight.data.view(np.float32).reshape(weight.shape) * 1.1))
        for weight in state.named_weights()
    ]


@pytest.mark.parametrize("way", ["load", "adopt"])
def test_weights_that_are_loaded_meanwhile_end_the_running_responses(model_path, way):
    """What was generated until then is the same as without them, and of the old version."""
    engine = HFRolloutEngine(model_path, interruptible=True)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    checked = []

    async def main():
        whole = await engine.generate(REQUESTS, params)
        running = asyncio.create_task(engine.generate(REQUESTS, params))
        for _ in range(6):
            await asyncio.sleep(0)
        if way == "load":
            engine.load_weights(changed(model_path), 1)
        else:
            engine.adopt_weights(changed(model_path), 1, lambda: checked.append(1))
        return whole, await running, await engine.generate(REQUESTS, params)

    whole, cut, after = asyncio.run(main())
    lengths = {len(one.response_ids) for one in cut}
    (length,) = lengths
    assert 0 < length < 24
    assert {(one.finish_reason, one.weight_version) for one in cut} == {("abort", 0)}
    assert [one.response_ids for one in cut] == [one.response_ids[:length] for one in whole]
    assert [one.log_probs for one in cut] == [one.log_probs[:length] for one in whole]
    assert {(one.finish_reason, one.weight_version) for one in after} == {("length", 1)}
    assert [one.log_probs for one in after] != [one.log_probs for one in whole]
    assert bool(checked) == (way == "adopt")


def test_generations_that_are_interruptible_run_one_after_the_other(model_path):
    """And give the same tokens as an engine that is not."""
    engine, plain = HFRolloutEngine(model_path, interruptible=True), HFRolloutEngine(model_path)
    params = SamplingParams(max_new_tokens=6)

    async def both():
        return await asyncio.gather(engine.generate(REQUESTS[:5], params), engine.generate(REQUESTS[5:], params))

    first, second = asyncio.run(both())
    assert first == generate(plain, REQUESTS[:5])
    assert second == generate(plain, REQUESTS[5:])


def test_a_cancelled_call_generates_no_further_token(model_path, monkeypatch):
    engine, steps = HFRolloutEngine(model_path, interruptible=True), []
    step = DecodingBatch.step
    monkeypatch.setattr(DecodingBatch, "step", lambda batch: steps.append(batch.made) or step(batch))

    async def main():
        running = asyncio.create_task(engine.generate(REQUESTS, SamplingParams(max_new_tokens=24, ignore_eos=True)))
        for _ in range(6):
            await asyncio.sleep(0)
        made = len(steps)
        running.cancel()
        await asyncio.wait([running])
        return running.cancelled(), made

    cancelled, made = asyncio.run(main())
    assert cancelled
    assert 0 < made < 24
    assert len(steps) == made


def test_what_adopted_weights_generated_after_they_were_overwritten_is_dropped_at_once(model_path):
    engine = HFRolloutEngine(model_path, interruptible=True)
    calls = []

    def watch():
        calls.append(1)
        if len(calls) == 2:
            raise WeightSyncError("overwritten")

    engine.adopt_weights(changed(model_path), 1, watch)
    with pytest.raises(RolloutError, match="version 1 is dropped"):
        generate(engine, REQUESTS, max_new_tokens=24, ignore_eos=True)
    assert len(calls) == 2


@pytest.fixture
def tied(model_path, tmp_path):
    """A model whose output layer is its embedding, which has one name in its files."""
    folder = shutil.copytree(model_path, tmp_path / "tied")
    model = AutoModelForCausalLM.from_pretrained(model_path)
    config = model.config
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("way", ["copied", "adopted"])
def test_a_tied_output_layer_may_be_sent_under_the_name_of_the_embedding_alone(tied, way):
    engine, policy = HFRolloutEngine(tied), TorchPolicyBackend(tied, None)
    sent = {weight.name: weight for weight in policy.named_weights() if weight.name != "lm_head.weight"}
    assert "model.embed_tokens.weight" in sent
    for version in (1, 2):
        changed = torch.randn(sent["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(version))
        weights = [*(sent | {"model.embed_tokens.weight": to_weight("model.embed_tokens.weight", changed)}).values()]
        if way == "copied":
            engine.load_weights(weights, version)
        else:
            engine.adopt_weights(weights, version, lambda: None)
        assert torch.equal(engine._model.lm_head.weight, changed)
        assert torch.equal(engine._model.model.embed_tokens.weight, changed)
    with pytest.raises(WeightSyncError, match=r"missing \['lm_head.weight', 'model.embed_tokens.weight'\]"):
        engine.load_weights([one for name, one in sent.items() if "embed" not in name], 3)


def test_the_head_of_a_model_that_is_not_tied_must_be_sent(model_path):
    engine, policy = HFRolloutEngine(model_path), TorchPolicyBackend(model_path, None)
    with pytest.raises(WeightSyncError, match=r"missing \['lm_head.weight'\]"):
        engine.load_weights([weight for weight in policy.named_weights() if weight.name != "lm_head.weight"], 1)
