"""Prompts whose characters a tokenizer does not know are named before a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.prompts import check_prompts_are_known
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.demo.tasks import write
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError


def warnings(task: str, folder: Path) -> list[str]:
    train, val = write(task, folder / task, train=64, val=8)
    files = (f"data.train_files={train}", f"data.val_files={val}", f"model.cache_dir={folder}")
    run = (f"trainer.output_dir={folder}", "rollout.response_length=4", "data.train_batch_size=64")
    return preflight(Facts(load_config([*files, *run]), PluginPolicy()))


def test_a_run_of_the_demos_model_on_words_is_warned_of(tmp_path: Path) -> None:
    assert warnings("arithmetic", tmp_path) == []
    (found,) = warnings("countdown", tmp_path)
    assert found.startswith("warning: 4")
    assert "% of the tokens of the first 64 train prompts are <unk>" in found
    assert "The first is '<unk>" in found
    assert "Set model.path" in found


def facts(tokenizer: Tokenizer, *prompts: tuple[int, ...]) -> Any:
    return SimpleNamespace(tokenizer=tokenizer, data={"train": [SimpleNamespace(prompt_ids=ids) for ids in prompts]})


def test_up_to_a_tenth_of_the_tokens_may_be_unknown() -> None:
    words = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    check_prompts_are_known(facts(words, (0, 1, 1, 1, 1), (1, 1, 1, 1, 1)))
    with pytest.raises(ConfigError, match=r"^20% of the tokens of the first 2 train prompts are \?.* '\? a a a a'"):
        check_prompts_are_known(facts(words, (0, 1, 1, 1, 1), (1, 1, 1, 1, 0)))
    check_prompts_are_known(facts(Tokenizer(models.BPE()), (0, 0)))  # without a token for unknown characters
