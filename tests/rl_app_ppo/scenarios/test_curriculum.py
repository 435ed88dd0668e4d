"""`data.curriculum`: prompts in the order of an installed package.

These tests call the functions that a run is built from.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.inputs.data import open_data, train_order
from rl_app_ppo.verl_import.convert import import_verl
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError
from rl_trainer.data.curricula.scored_order import ScoredOrder

DIFFICULTIES = [3, 0, 2, 5, 1, 4, 0, 7]
PACKAGE = """
import numpy as np
from rl_trainer import CurriculumKind

class EasyFirst:
    def __init__(self, rows):
        self.difficulty = np.array([rows[i].extra_info["difficulty"] for i in range(len(rows))])

    def epoch(self, number, rng):
        return rng.permutation(len(self.difficulty)) if number else np.argsort(self.difficulty, kind="stable")

class Says:
    def __init__(self, order):
        self.order = order

    def epoch(self, number, rng):
        return self.order

def fails(number, rng):
    raise LookupError("no plan")

easy_first = CurriculumKind(EasyFirst)
short = CurriculumKind(lambda rows: Says([0, 1]))
beyond = CurriculumKind(lambda rows: Says(np.arange(len(rows)) + 1))
halves = CurriculumKind(lambda rows: Says(np.arange(len(rows)) / 2))
class Weighs:
    def __init__(self, weights):
        self.given = weights

    def weights(self, scores):
        return self.given

by_score = CurriculumKind(lambda rows: Weighs([0.0] * 4 + [1.0] * 4))
negative = CurriculumKind(lambda rows: Weighs([1.0] * 7 + [-1.0]))
nothing = CurriculumKind(lambda rows: Weighs([0.0] * 8))
brief = CurriculumKind(lambda rows: Weighs([1.0]))
broken = CurriculumKind(lambda rows: type("Broken", (), {"epoch": staticmethod(fails)}))
bare = EasyFirst
"""


@pytest.fixture
def config(tmp_path, install_plugins):
    """Load the configuration of a run on eight rows in steps of three; arguments are overrides.

    DIFFICULTIES holds the difficulty of each row.
    """
    names = ("easy_first", "short", "beyond", "halves", "broken", "bare", "by_score", "negative", "nothing", "brief")
    site = install_plugins("rl_trainer.curricula", **{name: f"someones_curricula:{name}" for name in names})
    (site / "someones_curricula.py").write_text(PACKAGE)
    install_plugins("rl_trainer.curricula", allowed=False, sly="someones_curricula:easy_first")
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "val")}
    for file in files.values():
        rows = [
            {
                "data_source": "two_digit_addition",
                "prompt": [{"role": "user", "content": f"1{i}+11="}],
                "reward_model": {"ground_truth": str(21 + i)},
                "extra_info": {"difficulty": difficulty},
            }
            for i, difficulty in enumerate(DIFFICULTIES)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(*overrides):
        return load_config(
            [
                f"data.train_files={files['train']}",
                f"data.val_files={files['val']}",
                f"model.cache_dir={tmp_path / 'cache'}",
                "data.train_batch_size=3",
                "actor.ppo_mini_batch_size=3",
                "rollout.response_length=4",
                *overrides,
            ]
        )

    return load


def order_of(config):
    preflight(Facts(config, PluginPolicy()))
    return train_order(config, open_data(config, None)["train"])


def test_a_package_orders_rows_by_what_they_say_of_themselves(config):
    order = order_of(config("data.curriculum=easy_first"))
    assert [[DIFFICULTIES[row] for row in order.rows(step)] for step in range(2)] == [[0, 0, 1], [2, 3, 4]]
    second = order.take(8, 8)
    assert second == np.random.default_rng((0, 1)).permutation(8).tolist()
    # A step that spans two epochs, and the first one that a resumed run asks for.
    assert order_of(config("data.curriculum=easy_first")).rows(2) == [3, 7, second[0]]


def test_rows_can_be_taken_as_they_lie(config):
    order = order_of(config("data.curriculum=sequential"))
    assert order.take(0, 16) == [*range(8), *range(8)]
    assert order_of(config()).take(0, 8) not in ([*range(8)], order_of(config("data.curriculum=easy_first")).take(0, 8))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hard_first", "data.curriculum must be one of sequential, target_score, prioritized_replay, bare, beyond, "),
        ("easy_frist", "Did you mean 'easy_first'?"),
        ("sly", "data.curriculum='sly': The plug-in 'sly' (someones_curricula:easy_first of someones2 1.0) is installed but not allowed"),
        ("bare", "data.curriculum='bare': someones_curricula:bare must be of type CurriculumKind; got type"),
        ("short", "data.curriculum='short' must return 8 integers for epoch 0, one per row; got int64 of shape (2,)"),
        ("negative", "must return 8 finite weights after step 0, one per row, none below 0 and one above; got shape (8,), from -1.0 to 1.0"),
        ("nothing", "none below 0 and one above; got shape (8,), from 0.0 to 0.0"),
        ("brief", "data.curriculum='brief' must return 8 finite weights after step 0, one per row"),
        ("halves", "got float64 of shape (8,)"),
        ("beyond", "data.curriculum='beyond' must return row numbers from 0 to 7 for epoch 0; got 8"),
        ("broken", "data.curriculum='broken' failed in epoch 0: LookupError: no plan"),
    ],
)  # fmt: skip
def test_what_can_not_order_the_rows_is_refused_before_a_process_starts(config, name, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        preflight(Facts(config(f"data.curriculum={name}"), PluginPolicy()))


def test_rows_without_what_the_curriculum_looks_at_are_refused(config):
    demo = "data.train_files=", "data.val_files="
    with pytest.raises(
        ConfigError,
        match=r"'easy_first' can't be built for these 4000 rows: KeyError: 'difficulty' \(.*someones_curricula\.py:7\)\. Fix it, or leave",
    ):
        preflight(Facts(config("data.curriculum=easy_first", *demo), PluginPolicy()))


def test_a_package_weighs_rows_by_their_scores(config):
    """by_score gives rows 4 to 7 a weight."""
    order = order_of(config("data.curriculum=by_score"))
    assert isinstance(order, ScoredOrder)
    assert sorted(order.take(0, 4)) == [4, 5, 6, 7]


@pytest.mark.parametrize("name", ["target_score", "prioritized_replay"])
def test_built_in_curricula_see_scores_and_sources(config, name):
    order = order_of(config(f"data.curriculum={name}"))
    metrics = order.observe(1, dict.fromkeys(order.take(0, 3), (0.5, 0.25)))
    assert metrics["curriculum/seen_prompts"] == 3
    assert metrics["curriculum/two_digit_addition/score_mean"] == 0.5


def test_a_target_without_its_curriculum_has_no_effect(config):
    assert config("data.curriculum=target_score", "data.target_score=0.25").data.target_score == 0.25
    with pytest.raises(ConfigError, match=r"data\.target_score=0\.25 has no effect: .* data\.curriculum=target_score"):
        config("data.curriculum=prioritized_replay", "data.target_score=0.25")
    with pytest.raises(ConfigError, match=r"data\.target_score must be finite; got inf"):
        config("data.curriculum=target_score", "data.target_score=.inf")


def test_shares_and_a_curriculum_are_two_answers_to_one_question(config):
    with pytest.raises(ConfigError, match=r"data\.train_files must be files without shares with data\.curriculum='s"):
        config("data.train_files=0.7*a.jsonl,0.3*b.jsonl", "data.curriculum=sequential")


def test_what_verl_calls_it():
    file = {"data.shuffle": False, "data.sampler.class_path": "mine.py", "data.sampler.class_name": "Mine"}
    imported = import_verl(file)
    assert imported.settings["data.curriculum"] == "sequential"
    assert len(imported.lost) == 2
    assert all("set data.curriculum to the name of a curriculum" in why for why in imported.lost.values())
    assert "data.curriculum" not in import_verl({"data.shuffle": True}).settings
