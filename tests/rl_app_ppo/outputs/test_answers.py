"""Answers before and after training, from the sample files of a run."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from rl_app_ppo.outputs.answers import Answer, drop_samples_after, one_line, read_answers
from rl_app_ppo.outputs.console import Screen
from rl_trainer.rewards.scorer import Failure, Scored
from rl_trainer.workers.sample_log import SampleRow


def row(step, number, response, outcome, *, session=0, index=0, prompt=None):
    return SampleRow(
        key=f"v{step}-{number}/{session}/{index}",
        data_source="sums",
        prompt=prompt or f"{number}+1=",
        response=response,
        ground_truth="",
        outcome=outcome,
        note="units first",
    )


def scored(acc, **texts):
    return Scored(numbers={"acc": acc, "score": acc}, texts=texts)


def write(folder, name, rows):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(rows))


def test_the_first_five_prompts_are_shown_at_the_first_and_the_last_validation(tmp_path):
    for step in (0, 5, 10):
        rows = [row(step, number, f"r{step}", scored(float(step == 10))) for number in (10, 2, 0, 1, 3, 7)]
        write(tmp_path, str(step), rows)
    write(tmp_path, "train-20", [row(20, 0, "other", scored(1.0))])
    answers = read_answers(tmp_path)
    assert answers.steps == (0, 10)
    assert answers.note == "units first"
    expected = [Answer(f"{number}+1=", ("r0", False), ("r10", True)) for number in (0, 1, 2, 3, 7)]
    assert list(answers.rows) == expected


def test_a_prompt_shows_the_last_trajectory_of_its_first_session_or_what_the_reward_found_in_it(tmp_path):
    first = [
        row(0, 4, "late", scored(0.0), index=1),
        row(0, 4, "early", scored(1.0)),
        row(0, 4, "second", scored(1.0), session=1),
    ]
    write(tmp_path, "0", first)
    write(tmp_path, "9", [row(9, 4, "thinking .. 5", scored(1.0, pred="5"))])
    (answer,) = read_answers(tmp_path).rows
    assert answer == Answer("4+1=", ("late", False), ("5", True))


def test_a_response_without_a_score_is_not_right(tmp_path):
    write(tmp_path, "0", [row(0, 4, "5", Failure(kind="exception", message="no"))])
    write(tmp_path, "1", [row(1, 4, "5", scored(0.5))])
    (answer,) = read_answers(tmp_path).rows
    assert answer == Answer("4+1=", ("5", False), ("5", False))


@pytest.mark.parametrize("after", [[], [row(3, 5, "x", scored(1.0))], [row(3, 4, "x", scored(1.0), prompt="else")]])
def test_there_is_nothing_to_show_without_a_common_prompt(tmp_path, after):
    assert read_answers(tmp_path / "none") is None
    write(tmp_path, "0", [row(0, 4, "5", scored(1.0))])
    assert read_answers(tmp_path) is None
    write(tmp_path, "3", after)
    assert read_answers(tmp_path) is None


def test_a_resumed_run_shows_no_answers_of_steps_that_it_has_not_reached(tmp_path):
    """As one that was killed after step 15, and resumes after step 10 with 12 steps in all."""
    for step in (0, 10, 15):
        write(tmp_path, str(step), [row(step, 4, f"r{step}", scored(1.0))])
    write(tmp_path, "notes", [])
    drop_samples_after(tmp_path, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.jsonl", "10.jsonl", "notes.jsonl"]
    write(tmp_path, "12", [row(12, 4, "r12", scored(1.0))])
    assert read_answers(tmp_path).steps == (0, 12)
    drop_samples_after(tmp_path / "none", 0)


def test_texts_are_one_line_without_control_characters_and_no_markup(tmp_path):
    assert one_line("a\x1b[31m\n\n b\u202e", 20) == "a\ufffd[31m b\ufffd"
    assert one_line("0123456789", 4) == "…789"
    write(tmp_path, "0", [row(0, 4, "[bold]5[/bold]", scored(0.0))])
    write(tmp_path, "1", [row(1, 4, "5", scored(1.0))])
    out = io.StringIO()
    Screen(Console(file=out, width=100)).answers(read_answers(tmp_path))
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["validation", "prompt", "step", "0", "step", "1"],
        ["4+1=", "[bold]5[/bold]", "wrong", "5", "right"],
        ["units", "first"],
    ]
