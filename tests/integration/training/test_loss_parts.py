"""Answers of the data and a teacher, through the app with each engine for several processes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_app_ppo.config.loading import from_yaml
from rl_app_ppo.inputs.data import open_data

FSDP = ("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu")
MEGATRON = ("model_engine=megatron", "megatron.tensor_model_parallel_size=2")


def loss_of_transformers(model_path, rows):
    """`model(input_ids, labels=...)`, mean over the tokens of the answers and their ends."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), AutoTokenizer.from_pretrained(model_path)
    total, tokens = 0.0, 0
    for row in rows:
        prompt = list(row.prompt_ids)
        answer = [*tokenizer.encode(row.ground_truth, add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            loss = model(torch.tensor([prompt + answer]), labels=torch.tensor([[-100] * len(prompt) + answer])).loss
        total, tokens = total + loss.item() * len(answer), tokens + len(answer)
    return total / tokens


@pytest.mark.parametrize(
    ("engine", "parts"),
    [
        pytest.param(FSDP, ("algorithm=sft",), marks=pytest.mark.nightly, id="fsdp-alone"),
        pytest.param(
            MEGATRON,
            ("algorithm=grpo", "algorithm.sft_coef=0.5", "rollout.n=3"),
            marks=pytest.mark.slow,
            id="megatron-mixed",
        ),
    ],
)
def test_the_cross_entropy_is_that_of_transformers_and_falls(app, base_model, engine, parts):
    """One mini-batch has all rows, so that the first loss is that of the untrained model."""
    done = app(*engine, *parts, "data.train_size=8", "actor.optim.lr=1e-3", "trainer.total_training_steps=3")
    assert done.code == 0, done.err
    losses = [step["actor/ce_loss"] for step in done.metrics[1:]]
    rows = open_data(from_yaml((done.folder / "config.yaml").read_text()), None)["train"]
    assert losses[0] == pytest.approx(loss_of_transformers(base_model, [rows[i] for i in range(8)]), rel=1e-5)
    assert losses[-1] < losses[0]
    mixed = "algorithm=grpo" in parts
    for step in done.metrics[1:]:
        assert ("actor/pg_loss" in step, "critic/score/mean" in step) == (mixed, mixed)
        assert step["demonstration/score/min"] == 1.0


@pytest.mark.parametrize(
    ("engine", "algorithm"),
    [
        pytest.param(FSDP, "opd", marks=pytest.mark.nightly, id="fsdp"),
        pytest.param(FSDP, "opd_pg", marks=pytest.mark.nightly, id="fsdp-pg"),
        pytest.param(MEGATRON, "opd_pg", marks=pytest.mark.slow, id="megatron-pg"),
    ],
)
def test_a_teacher_of_another_size_draws_an_adapter_to_it(app, base_model, tmp_path, engine, algorithm):
    """LoRA has no reference process of its own; a teacher is one."""
    config = AutoModelForCausalLM.from_pretrained(base_model).config
    config.hidden_size, config.intermediate_size = 64, 96
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(base_model).save_pretrained(tmp_path / "teacher")
    given = (f"algorithm={algorithm}", f"actor.use_kl_loss={str(algorithm == 'opd').lower()}")
    teacher = (f"reference.path={tmp_path / 'teacher'}", "lora.rank=4", "actor.optim.lr=1e-2")
    done = app(*engine, *given, *teacher, "trainer.total_training_steps=4", "rollout.ignore_eos=true")
    assert done.code == 0, done.err
    assert from_yaml((done.folder / "config.yaml").read_text()).loads_reference
    by_loss = algorithm == "opd"
    divergence = [step["actor/kl_loss" if by_loss else "actor/ref_kl"] for step in done.metrics[1:]]
    assert divergence[0] > 1
    assert divergence[-1] < divergence[0]
    for step in done.metrics[1:] if not by_loss else []:
        assert step["critic/returns/mean"] == pytest.approx(-step["actor/ref_kl"], rel=1e-4)
        assert step["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-4 * step["critic/advantages/max"])


@pytest.mark.slow
def test_a_slow_teacher_stays_behind_the_policy(app):
    """The reference sees what the policy sees, so that only its slower weights differ."""
    itself = ("algorithm.teacher_context='='", "algorithm.teacher_is_policy=true", "algorithm.teacher_ema=0.9")
    seen = ("actor.optim.lr=1e-2", "actor.use_kl_loss=false", "algorithm.use_kl_in_reward=true")
    done = app(*itself, *seen, "trainer.total_training_steps=2", "rollout.ignore_eos=true", "trainer.test_freq=0")
    assert done.code == 0, done.err
    assert not from_yaml((done.folder / "config.yaml").read_text()).loads_reference
    first, second = (step["actor/reward_kl_penalty"] for step in done.metrics[-2:])
    assert first != second


@pytest.mark.slow
def test_the_policy_is_its_own_teacher_with_more_to_read(app):
    """From the first step the teacher differs, though its weights are those of the policy."""
    itself = ("algorithm.teacher_context='{answer}='", "algorithm.teacher_is_policy=true")
    done = app(*MEGATRON, "algorithm=opd_pg", *itself, "actor.optim.lr=1e-3", "rollout.ignore_eos=true")
    assert done.code == 0, done.err
    assert not from_yaml((done.folder / "config.yaml").read_text()).loads_reference
    assert len(done.metrics) == 3
    for step in done.metrics[1:]:
        assert abs(step["actor/ref_kl"]) > 1e-3
        assert step["critic/returns/mean"] == pytest.approx(-step["actor/ref_kl"], rel=1e-4)
