"""The demo learns from answers and from a teacher: sooner than from rewards alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from app_runs import MARK, PATIENT, command

ACCURACY = "val-core/two_digit_addition/acc/mean@1"
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
        return {row["step"]: row[ACCURACY] for row in rows if ACCURACY in row}

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


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("algorithm", "more"), [("sft", ()), ("grpo", ("algorithm.sft_coef=0.5",))], ids=["answers", "answers-and-rewards"]
)
def test_answers_teach(curve, algorithm, more):
    accuracies = curve("run", f"algorithm={algorithm}", *more)
    assert accuracies[0] <= 0.45
    assert accuracies[max(accuracies)] >= 0.95
