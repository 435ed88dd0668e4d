"""The demo tasks as files: their rows are correct and their scorers strict."""

from __future__ import annotations

import json

import pytest

from rl_app_ppo.demo.addition import make_sums
from rl_app_ppo.demo.tasks import TASKS, main, puzzles, write
from rl_app_ppo.demo.tokenizer import demo_tokenizer
from rl_trainer.data.chat_template import PromptEncoder
from rl_trainer.data.prompt_files import open_files
from rl_trainer.data.prompt_preparation import DataFiles
from rl_trainer.rewards.countdown import score


@pytest.mark.parametrize("task", TASKS)
def test_what_is_written_can_be_trained_on(task, tmp_path):
    paths = write(task, tmp_path / "data", train=60, val=20)
    encoder = PromptEncoder(demo_tokenizer())
    train, val = (
        open_files(DataFiles(paths=(path,), max_prompt_length=200), encoder, tmp_path / "cache") for path in paths
    )
    assert (len(train), len(val)) == (60, 20)
    prompts = [json.loads(line)["prompt"][0]["content"] for path in paths for line in path.read_text().splitlines()]
    assert len(set(prompts)) == 80
    again = write(task, tmp_path / "again", train=60, val=20)
    assert [a.read_bytes() for a in again] == [p.read_bytes() for p in paths]
    other = write(task, tmp_path / "other", train=60, val=20, seed=1)
    assert other[0].read_bytes() != paths[0].read_bytes()


def test_the_arithmetic_files_are_the_demo(tmp_path):
    train, _ = write("arithmetic", tmp_path, train=30, val=10)
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    split = make_sums(0, train_size=30, validation_size=10)
    assert [(r["prompt"][0]["content"], r["reward_model"]["ground_truth"]) for r in rows] == [
        (p.prompt, p.answer) for p in split.train
    ]


def test_sorting_is_sorted(tmp_path):
    train, _ = write("sorting", tmp_path, train=30, val=10)
    for line in train.read_text().splitlines():
        row = json.loads(line)
        given = [int(word) for word in row["prompt"][0]["content"].rpartition(":")[2].split()]
        assert row["reward_model"]["ground_truth"] == " ".join(map(str, sorted(given)))


TRUTH = '{"numbers": [3, 5, 2], "target": 16}'


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("(3+5)*2", 1.0),
        ("Let me see: 3+5 is 8.\n2*(5+3) = 16\n", 1.0),
        ("(3*5)+2", 0.1),
        ("3*5+2-1", 0.0),  # 1 is not a given number
        ("3+3+5+5", 0.0),  # each number is used twice
        ("2**(5-1)", 0.0),
        ("16", 0.0),
        ("3/(5-5)", 0.0),
        ("__import__('os').system('true')", 0.0),
        ("True*16", 0.0),
        ("", 0.0),
        ("(" * 150 + "3", 0.0),
        ("-" * 190 + "3", 0.0),
        ("3.0*5", 0.0),
    ],
)
def test_countdown_is_scored_without_executing_anything(response, expected):
    result = score("countdown", response, TRUTH)
    assert (result["score"], result["acc"]) == (expected, float(expected == 1.0))


def test_every_countdown_has_a_solution():
    from itertools import permutations, product

    for puzzle in puzzles(3, 40):
        shapes = ("({}{}{}){}{}", "{}{}({}{}{})")
        found = any(
            score("c", shape.format(a, o, b, p, c), json.dumps({"numbers": puzzle.numbers, "target": puzzle.target}))[
                "acc"
            ]
            for a, b, c in permutations(puzzle.numbers)
            for o, p in product("+-*/", repeat=2)
            for shape in shapes
        )
        assert found, puzzle


def test_the_command_says_what_to_set(tmp_path, capsys):
    assert main(["sorting", str(tmp_path), "--train", "3", "--val", "2"]) == 0
    assert capsys.readouterr().out == f"data.train_files={tmp_path}/train.jsonl data.val_files={tmp_path}/val.jsonl\n"
    assert main(["arithmetic", str(tmp_path), "--train", "999999"]) == 2
    assert "There are 5050 problems" in capsys.readouterr().err
