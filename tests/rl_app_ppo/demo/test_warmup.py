"""The warm-up: determinism, progress, measurement, content hash."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rl_app_ppo.demo.addition import make_split
from rl_app_ppo.demo.model import build_tokenizer, fresh_model
from rl_app_ppo.demo.settings import ModelSettings, WarmUpSettings
from rl_app_ppo.demo.tokenizer import EOS_ID, PAD_ID
from rl_app_ppo.demo.warmup import content_hash, right_answers, warm_up
from rl_protocol import ConfigError

TINY = WarmUpSettings(
    train_size=50,
    validation_size=20,
    max_steps=3,
    check_every=2,
    batch_size=8,
    model=ModelSettings(hidden_size=16, intermediate_size=32, layers=1, heads=2),
)


def test_equal_settings_give_equal_weights() -> None:
    torch.manual_seed(1)
    first = warm_up(TINY)
    torch.manual_seed(2)
    second = warm_up(TINY)
    assert first.accuracy == second.accuracy
    for (name, a), b in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_another_seed_gives_other_weights() -> None:
    a, b = (warm_up(replace(TINY, seed=seed)).model.lm_head.weight for seed in (0, 1))
    assert not torch.equal(a, b)


def test_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    warm_up(TINY)
    assert torch.equal(before, torch.get_rng_state())


def test_progress_reports_every_step_and_measures_at_checks() -> None:
    calls: list[tuple[int, int, float, float | None]] = []
    result = warm_up(TINY, lambda *call: calls.append(call))
    assert [(step, total) for step, total, _, _ in calls] == [(1, 3), (2, 3), (3, 3)]
    assert [accuracy is not None for *_, accuracy in calls] == [False, True, True]
    assert all(loss > 0 for _, _, loss, _ in calls)
    assert calls[-1][3] == result.accuracy


def test_ends_at_the_target() -> None:
    calls: list[int] = []
    warm_up(replace(TINY, target_probability=0.0), lambda step, *_: calls.append(step))
    assert calls == [1, 2]


def test_one_pass_agrees_with_greedy_generation() -> None:
    model = warm_up(replace(TINY, max_steps=60, batch_size=64, lr=1e-2, careless_share=0.0)).model
    tokenizer = build_tokenizer()
    problems = make_split(0, train_size=50, validation_size=20).train
    prompts = torch.tensor([tokenizer.encode(p.prompt) for p in problems])
    tokens = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=4,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
    )
    responses = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens[:, prompts.shape[1] :]]
    right = sum(r == p.answer for r, p in zip(responses, problems, strict=True))
    measured = right_answers(model, tokenizer, problems)
    assert measured.greedy == pytest.approx(right / len(problems))
    assert 0 < measured.probability < 1


def test_default_model_is_a_third_of_a_million_parameters() -> None:
    assert sum(p.numel() for p in fresh_model(ModelSettings(), 0).parameters()) == 333_184


def test_content_hash_sees_every_setting() -> None:
    changed = [
        replace(TINY, seed=1),
        replace(TINY, lr=1e-4),
        replace(TINY, check_every=1),
        replace(TINY, model=replace(TINY.model, layers=2)),
    ]
    hashes = {content_hash(s) for s in (TINY, *changed)}
    assert len(hashes) == 5
    assert content_hash(TINY) == content_hash(replace(TINY))


def test_content_hash_sees_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = content_hash(TINY)
    monkeypatch.setattr("rl_app_ppo.demo.settings.version", lambda name: f"{name}-next")
    assert content_hash(TINY) != before


@pytest.mark.parametrize(("key", "value"), [("max_steps", 0), ("careless_share", 1.5), ("target_probability", -0.1)])
def test_wrong_settings_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        replace(TINY, **{key: value})
