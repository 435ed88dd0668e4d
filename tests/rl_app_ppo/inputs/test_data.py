"""Without data.val_files, a share of the training rows is held out, or there is no validation."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from rl_app_ppo.config.full_keys import full_keys_in_errors
from rl_app_ppo.config.loading import load_config, to_yaml
from rl_app_ppo.inputs.data import about_validation, check_answers, open_data, sessions_of, train_order
from rl_app_ppo.outputs.resume import changes
from rl_protocol import ConfigError
from rl_trainer import PromptRow, Tokenizer
from rl_trainer.data.validation_split import hold_out


@pytest.fixture
def files(tmp_path):
    """a.jsonl with 60 rows and b.jsonl with 40; their answers are the numbers 0..99."""

    def write(name, numbers):
        rows = [
            {"data_source": "d", "prompt": f"{i // 10}+{i}=", "reward_model": {"ground_truth": str(i)}} for i in numbers
        ]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    return write("a.jsonl", range(60)), write("b.jsonl", range(60, 100))


@pytest.fixture
def config(tmp_path, files):
    def make(*overrides, train=""):
        names = train or f"{files[0]},{files[1]}"
        return load_config([f"data.train_files={names}", f"model.cache_dir={tmp_path / 'cache'}", *overrides])

    return make


def truths(rows):
    return [int(rows[i].ground_truth) for i in range(len(rows))]


def test_a_tenth_of_the_rows_is_held_out_the_same_in_every_process_and_run(config):
    data = open_data(config(), None)
    train, val = truths(data["train"]), truths(data["val"])
    assert (len(train), len(val)) == (90, 10)
    assert sorted(train + val) == list(range(100))  # disjoint and complete
    assert train == sorted(train)
    again = open_data(config("trainer.seed=7", "trainer.test_freq=1", "trainer.total_training_steps=9"), None)
    assert truths(again["val"]) == val
    assert about_validation(config(), data) == (
        "validation: 10 of the 100 rows of data.train_files are held out (data.val_split=0.1)"
    )


def test_a_model_without_a_chat_template_gets_no_tools(config):
    """The tokenizer of most demos has none."""
    tools = ("rollout.session=tool_agent", "rollout.agent.tools=[calculator]")
    for more in ((), ("rollout.agent.dialect=hermes",)):
        with pytest.raises(ConfigError, match=r"data\.demo=sums has none. Set preset=demo-calculator, or model\.path"):
            open_data(config(*tools, *more), None)
    with pytest.raises(ConfigError, match=r"rollout\.agent\.turns=3 has no effect.*rollout\.session=tool_agent"):
        config("rollout.agent.turns=3")


def test_shares_count_the_rows_that_are_left_of_each_file(config, files):
    chosen = config("data.val_split=0.5", train=f"0.5*{files[0]},0.5*{files[1]}")
    rows = open_data(chosen, None)["train"]
    first = sum(truth < 60 for truth in truths(rows))
    assert rows.rows_of_files == (first, 50 - first)
    epoch = [truths(rows)[i] for i in train_order(chosen, rows).take(0, 50)]
    assert sum(truth < 60 for truth in epoch) == 25


@pytest.mark.parametrize("overrides", [["trainer.test_freq=0"], ["data.val_split=0"]])
def test_without_a_share_or_a_pace_all_rows_are_trained_on_and_none_validated(config, overrides):
    chosen = config(*overrides)
    data = open_data(chosen, None)
    assert truths(data["train"]) == list(range(100))
    assert "val" not in data
    assert about_validation(chosen, data).startswith("no validation: data.val_files is empty")


def test_the_prompts_of_a_source_with_answers_alone_have_one_response():
    rows = [PromptRow(prompt_ids=(1,), data_source=source, ground_truth="") for source in ("a", "b", "a")]
    alone = "algorithm.by_source=rl_coef=0@a,sft_coef=1@a"
    sessions = sessions_of(load_config(["rollout.n=3", alone]), rows)
    assert [sessions(row) for row in range(3)] == [1, 3, 1]
    assert sessions_of(load_config(["rollout.n=3", "algorithm.by_source=sft_coef=1@a"]), rows) is None
    assert sessions_of(load_config(["algorithm=sft"]), rows) is None


def test_answers_that_can_not_be_trained_on_are_counted_and_the_first_is_shown():
    rows = [
        PromptRow(prompt_ids=tuple(map(ord, prompt)), data_source="d", ground_truth=truth)
        for prompt, truth in (("1+1=", "2"), ("5+5=", "10.0"), ("9+9=", "18.0"))
    ]
    letters = Tokenizer(encode=lambda text: list(map(ord, text)), decode=lambda ids: "".join(map(chr, ids)))
    chosen = load_config(["algorithm=sft", "rollout.response_length=4"])
    with pytest.raises(ConfigError, match=r"of 5 tokens\. .* ends with '5\+5='\. 2 rows of 3 can't be trained on\.$"):
        check_answers(chosen, letters, rows)
    check_answers(chosen, letters, rows[:1])


def test_files_for_validation_leave_the_training_rows_whole(config, files):
    chosen = config(f"data.val_files={files[1]}", train=str(files[0]))
    data = open_data(chosen, None)
    assert (len(data["train"]), len(data["val"])) == (60, 40)
    assert about_validation(chosen, data) == ""
    with pytest.raises(ConfigError, match=r"data\.val_split=0\.2 has no effect"):
        config(f"data.val_files={files[1]}", "data.val_split=0.2")


@pytest.mark.parametrize(("size", "share", "held"), [(2, 0.1, 1), (2, 0.9, 1), (10, 0.25, 2), (1000, 0.05, 50)])
def test_each_part_has_a_row(size, share, held):
    train, val = hold_out(size, share)
    assert len(val) == held
    assert sorted(np.concatenate([train, val]).tolist()) == list(range(size))


def test_too_few_rows_and_shares_beyond_all_are_refused(config):
    for share in (-0.1, 1):
        with pytest.raises(ConfigError, match=r"data\.val_split must be in \[0, 1\)"):
            config(f"data.val_split={share}")
    message = r"data\.train_files \(without data\.val_files\) must be at least 2, .* got 1\. Set trainer\.test_freq=0"
    with pytest.raises(ConfigError, match=message), full_keys_in_errors():
        hold_out(1, 0.5)


def test_a_resumed_run_keeps_its_training_rows(config, files):
    def resumed(before, now):
        checkpoint = SimpleNamespace(config=to_yaml(before), folder="step-1", manifest=SimpleNamespace(step=1))
        return changes(checkpoint, now)

    assert resumed(config(), config("trainer.test_freq=1")) == ["trainer.test_freq: 5 -> 1"]
    for before, now, key in (
        (config(), config("trainer.test_freq=0"), "trainer.test_freq"),
        (config("trainer.test_freq=0"), config(), "trainer.test_freq"),
        (config(), config("data.val_split=0.2"), "data.val_split"),
    ):
        with pytest.raises(ConfigError, match=rf"{key}=.* is not what the checkpoint"):
            resumed(before, now)
    with_files = config(f"data.val_files={files[1]}", train=str(files[0]))
    without = config(f"data.val_files={files[1]}", "trainer.test_freq=0", train=str(files[0]))
    assert resumed(with_files, without) == ["trainer.test_freq: 5 -> 0"]
