"""The reward model scorer gives the scores of one forward pass per sequence."""

from __future__ import annotations

import asyncio
import json
import shutil
from threading import Event, get_ident

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relative import apart
from transformers import (
    AutoModelForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from rl_protocol import BatchData, ConfigError, ObjectColumn, ragged
from rl_protocol.rl_columns import prompt_partition
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import ActorConfig, AlgorithmConfig, RewardSettings, RewardWorker, step_columns
from rl_trainer.backends.reward_model import RewardModelScorer, padded_batches
from rl_trainer.rewards import CombinedScorer, Failure, InlineScorer, Sample, Scored, Term
from rl_trainer.rewards.scorer_toml import RewardModelConfig
from rl_trainer.workers.messages import StageCall

pytestmark = pytest.mark.numeric


def config(**facts):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen2Config(
        vocab_size=14,
        num_key_value_heads=2,
        max_position_embeddings=16,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        **{"num_labels": 1, "pad_token_id": 0, **sizes, **facts},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("reward")
    Qwen2ForSequenceClassification(config()).save_pretrained(path)
    return path


def direct(path, tokens):
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0, 0].item()


def samples(*sequences):
    return [Sample(data_source="s", solution_str="", ground_truth="", tokens=list(tokens)) for tokens in sequences]


SEQUENCES = [[5, 6, 7], [2], [9, 3, 4, 8, 11, 1], [5, 6, 7, 8], [13] * 16, [2, 3]]


@pytest.mark.parametrize("max_tokens", [1, 8, 1000])
@pytest.mark.parametrize("pad", [0, None])
def test_scores_are_those_of_a_forward_pass_of_each_alone(folder, tmp_path, max_tokens, pad):
    path = folder
    if pad is None:  # without a pad token, it can't find the end of a padded sequence
        path = tmp_path / "unpadded"
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        model.config.pad_token_id = None
        model.save_pretrained(path)
    scorer = RewardModelScorer(RewardModelConfig(path=str(path), device="cpu", max_tokens=max_tokens))
    outcomes = asyncio.run(scorer.score(samples(*SEQUENCES)))
    found = [one.numbers["score"] for one in outcomes]
    want = [direct(path, tokens) for tokens in SEQUENCES]
    assert apart(found, want) < 1e-5
    assert len({round(one, 4) for one in found}) == len(SEQUENCES)


def test_what_the_model_can_not_take_fails_alone(folder):
    scorer = RewardModelScorer(RewardModelConfig(path=str(folder), device="cpu"))
    good, long, unknown, empty = asyncio.run(scorer.score(samples([3, 4], [2] * 17, [3, 14], [])))
    assert isinstance(good, Scored)
    assert long == Failure(kind="exception", message="has 17 tokens; the reward model takes 16")
    assert isinstance(unknown, Failure)
    assert "holds token 14; the reward model knows 14" in unknown.message
    assert isinstance(empty, Failure)
    assert asyncio.run(scorer.score([])) == []


def test_a_score_that_is_no_number_is_a_failure(folder, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.score.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    (outcome,) = asyncio.run(RewardModelScorer(RewardModelConfig(path=str(tmp_path), device="cpu")).score(samples([3])))
    assert isinstance(outcome, Failure)
    assert outcome.kind == "no_number"


def test_a_model_without_a_trained_head_or_with_several_labels_is_refused(tmp_path):
    Qwen2ForCausalLM(config()).save_pretrained(tmp_path / "language")
    Qwen2ForSequenceClassification(config(num_labels=2)).save_pretrained(tmp_path / "two")
    (tmp_path / "none").mkdir()
    for name, message in (
        ("language", r"holds no score\.weight"),
        ("two", "has 2 labels"),
        ("none", "can't be loaded"),
    ):
        with pytest.raises(ConfigError, match=message):
            RewardModelScorer(RewardModelConfig(path=str(tmp_path / name), device="cpu"))


def test_a_wrong_field_of_the_configuration_is_named_with_its_folder(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "wrong")
    described = json.loads((folder / "config.json").read_text())
    (tmp_path / "wrong" / "config.json").write_text(json.dumps({**described, "hidden_act": "x"}))
    with pytest.raises(ConfigError, match=r"The reward model .*wrong can't be loaded by .* Look at its config\.json"):
        RewardModelScorer(RewardModelConfig(path=str(tmp_path / "wrong"), device="cpu"))


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 100))
def test_batches_hold_every_row_once_and_no_more_tokens_than_allowed(lengths, max_tokens):
    batches = padded_batches(lengths, max_tokens)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    assert all(len(rows) == 1 or len(rows) * max(lengths[i] for i in rows) <= max_tokens for rows in batches)


def test_concurrent_calls_are_computed_in_one_thread(folder, monkeypatch):
    """A pass waits until a second one had the chance to begin beside it."""
    scorer, threads, second = RewardModelScorer(RewardModelConfig(path=str(folder), device="cpu")), [], Event()
    forward = scorer._forward

    def watched(sequences):
        threads.append(get_ident())
        second.wait(0.5) if len(threads) == 1 else second.set()
        return forward(sequences)

    monkeypatch.setattr(scorer, "_forward", watched)

    async def both():
        return await asyncio.gather(scorer.score(samples([5, 6, 7])), scorer.score(samples([2])))

    one, two = asyncio.run(both())
    asyncio.run(scorer.close())
    assert len(threads) == 2
    assert len(set(threads)) == 1
    assert (
        apart([one[0].numbers["score"], two[0].numbers["score"]], [direct(folder, [5, 6, 7]), direct(folder, [2])])
        < 1e-5
    )


def test_the_reward_worker_gives_it_prompt_and_response(folder):
    """A weighted sum with a function of the text; both components are reported."""

    async def run():
        plane, algorithm = MemoryDataPlane(), AlgorithmConfig()
        facts = {"data_source": ["s"] * 2, "ground_truth": ["8", "x"], "extra_info": [{}] * 2}
        columns = {name: ObjectColumn.from_values(values) for name, values in facts.items()}
        prompts = BatchData({"prompts": ragged([[5, 6], [7]], "int64"), **columns})
        await plane.put(prompt_partition("train"), ["p", "q"], prompts)
        keys = ["p/0/0", "p/1/0", "q/0/0"]
        await plane.put("train", keys, BatchData({"responses": ragged([[7, 8], [8], [9, 10, 11]], "int64")}))
        match = InlineScorer(lambda source, text, truth, extra: float(text == truth))
        scorer = CombinedScorer(
            [Term("rm.toml", 0.5), Term("match", 2.0)],
            [RewardModelScorer(RewardModelConfig(path=str(folder), device="cpu")), match],
        )
        decode = lambda ids: "".join(map(str, ids))  # noqa: E731
        worker = RewardWorker(
            plane,
            step_columns(algorithm, ActorConfig()),
            scorer,
            decode,
            RewardSettings(algorithm=algorithm, response_length=4),
        )
        batch = await plane.list_rows("train")
        result = await worker.run("reward", StageCall(step=1, batch=batch.without_tags()))
        scored = await plane.get(batch, ["scores"])
        return result, dict(zip(batch.keys, scored.dense("scores").values.tolist(), strict=True))

    result, scores = asyncio.run(run())
    model = {
        "p/0/0": direct(folder, [5, 6, 7, 8]),
        "p/1/0": direct(folder, [5, 6, 8]),
        "q/0/0": direct(folder, [7, 9, 10, 11]),
    }
    right = {"p/0/0": 0.0, "p/1/0": 1.0, "q/0/0": 0.0}
    want = [0.5 * model[key] + 2 * right[key] for key in scores]
    assert len(want) == 3
    assert apart(list(scores.values()), want) < 1e-5
    reported = result.metrics["reward/extra/rm.toml/score"]
    assert apart(reported, sum(model.values()) / 3, list(model.values())) < 1e-5
    assert result.metrics["reward/extra/match/score"] == pytest.approx(1 / 3)
