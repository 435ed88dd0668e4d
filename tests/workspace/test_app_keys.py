"""Packages name their own parameters in messages, and no keys of the app, which adds them.

`rl_app_ppo.config.full_keys` turns `TransferQueueConfig.capacity_mb` into the key.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packages import PACKAGES

from rl_app_ppo.config.loading import options

KEYS = re.compile(
    r"(?<![\w.])(?:" + "|".join(sorted((re.escape(o.key) for o in options()), key=len, reverse=True)) + r")(?![\w])"
)
ALONE = re.compile(r"(?<![\w.])(?:model_engine|placement)[=!]")
CHECKED = sorted(set(PACKAGES) - {"rl_app_ppo", "rl_trainer"})
"""rl_trainer has the groups of the app in its own configuration."""


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings of a module, except docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def found(text: str) -> list[str]:
    dotted = [match for match in KEYS.findall(text) if "." in match]
    return [*dotted, *ALONE.findall(text)]


@pytest.mark.parametrize("package", CHECKED)
def test_messages_name_no_key_of_the_app(package: str) -> None:
    root = Path(PACKAGES[package])
    printed = [
        f"{path.relative_to(root)}:{line}: {key}"
        for path in sorted(root.rglob("*.py"))
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        for key in found(text)
    ]
    assert printed == []


def test_keys_are_found_in_sentences_and_not_in_other_names() -> None:
    assert found("raise transfer_queue.capacity_mb.") == ["transfer_queue.capacity_mb"]
    assert found("set model_engine=torch") == ["model_engine="]
    assert found("TransferQueueConfig.capacity_mb, rl_x.rollout.n, rollout.name_of, model.safetensors") == []
