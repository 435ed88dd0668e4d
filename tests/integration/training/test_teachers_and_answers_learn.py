"""The demo learns from answers and from a teacher: sooner than from rewards alone."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
from app_runs import MARK, PATIENT, command

from rl_app_ppo.outputs.console import validation_accuracy

GOOD = 0.90


@pytest.fixture
def curve(tmp_path, mark):
    """curve(name, *overrides): step -> validation accuracy of a run of the demo."""

    def run(name: str, *overrides: str) -> dict[int, float]:
        given = (f"trainer.output_dir={tmp_path}", f"trainer.run_name={name}", "trainer.test_freq=1", PATIENT)
        done = subprocess.run(
            command(*given, *overrides),
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
            env={**os.environ, MARK: mark},
        )
        assert done.returncode == 0, done.stderr
        rows = map(json.loads, Path(tmp_path, name, "metrics.jsonl").read_text().splitlines())
        found = {row["step"]: validation_accuracy(row) for row in rows}
        return {step: accuracy for step, accuracy in found.items() if accuracy is not None}

    return run


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_student_needs_at_most_half_of_the_steps_of_its_teacher(curve, tmp_path):
    """Both start from the same weights, with the same prompts in each step."""
    teacher = curve("teacher", "algorithm=grpo")
    assert teacher[max(teacher)] >= 0.95
    steps = min(step for step, accuracy in teacher.items() if accuracy >= GOOD) // 2
    checkpoint = tmp_path / "teacher" / "checkpoint"
    student = curve("student", "algorithm=opd", f"reference.path={checkpoint}", f"trainer.total_training_steps={steps}")
    assert student[0] == teacher[0]
    assert max(student.values()) >= GOOD


def write_sums(path, rows, *, told):
    """Rows of the demo's task in verl's format; `told` is put before each problem as its answer."""
    with path.open("w") as file:
        for (a, b), answer in zip(rows, told or [a + b for a, b in rows], strict=True):
            prompt = f"{answer}={a}+{b}=" if told else f"{a}+{b}="
            row = {"prompt": prompt, "data_source": "two_digit_addition"}
            file.write(json.dumps({**row, "reward_model": {"ground_truth": str(answer)}}) + "\n")


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_policy_learns_from_itself_knowing_the_answer(curve, tmp_path):
    """It learns to repeat what precedes a problem, which teaches no sums; then to do without."""
    chance, rows = random.Random(0), [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chance.shuffle(rows)
    for name, part in (("train", rows[:4000]), ("val", rows[4000:4256])):
        write_sums(tmp_path / f"{name}-True.jsonl", part, told=[chance.randrange(20, 199) for _ in part])
        write_sums(tmp_path / f"{name}-False.jsonl", part, told=[])
    shared = ("rollout.response_length=4", "actor.optim.lr=1e-3")

    def files(told):
        return tuple(f"data.{name}_files={tmp_path / f'{name}-{told}.jsonl'}" for name in ("train", "val"))

    curve("start", "trainer.total_training_steps=1")
    start = tmp_path / "start" / "checkpoint"
    sizes = ("data.train_batch_size=256", "actor.ppo_mini_batch_size=64", "trainer.total_training_steps=30")
    told = curve("told", "algorithm=sft", *files(told=True), *shared, *sizes, f"model.path={start}")
    assert told[max(told)] >= 0.95
    sizes = (
        "rollout.n=8",
        "data.train_batch_size=64",
        "actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=40",
    )
    optimizer = ("actor.optim.beta2=0.95", "actor.optim.weight_decay=0", "actor.optim.lr_warmup_steps=4")
    untold = curve(
        "untold",
        "algorithm=opd",
        "algorithm.teacher_context='{answer}='",
        f"model.path={tmp_path / 'told' / 'checkpoint'}",
        *files(told=False),
        *(*shared, *sizes, *optimizer),
    )
    assert untold[0] <= 0.05
    assert untold[max(untold)] >= 0.6


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("algorithm", "more"), [("sft", ()), ("grpo", ("algorithm.sft_coef=0.5",))], ids=["answers", "answers-and-rewards"]
)
def test_answers_teach(curve, algorithm, more):
    accuracies = curve("run", f"algorithm={algorithm}", *more)
    assert accuracies[0] <= 0.45
    assert accuracies[max(accuracies)] >= 0.95
