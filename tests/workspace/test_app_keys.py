"""Packages name their own parameters in messages, and no keys of the app, which adds them.

`rl_app_ppo.config.full_keys` turns `TransferQueueConfig.capacity_mb` into the key. A parameter is a
member of a class or an argument of a function or of the class.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from packages import PACKAGES

from rl_app_ppo.config.full_keys import with_full_keys
from rl_app_ppo.config.loading import options

KEYS = re.compile(
    r"(?<![\w.])(?:" + "|".join(sorted((re.escape(o.key) for o in options()), key=len, reverse=True)) + r")(?![\w])"
)
ALONE = re.compile(r"(?<![\w.])(?:model_engine|placement)[=!]")
PARAMETER = re.compile(r"(?<![\w.])([A-Za-z]\w+)\.([a-z]\w*)(?![\w(])")
WITHOUT_KEY = {
    *("BatchMeta.concat", "BatchMeta.union", "KVBatchMeta.concat"),  # methods
    *("KVBatchMeta.extra_info", "Locate.generations", "WantedPiece.rows"),  # parts of messages
    *(
        "VLLMConfig.adapter",
        "VLLMConfig.max_logprobs",
        "VLLMConfig.sleep_mode",
        "VLLMConfig.tokenizer",
    ),  # the app sets them
    "EndpointConfig.sampling",  # of an endpoint that a program opens
    *("Generation.kept", "Generation.routed", "Trajectory.kept", "Trajectory.routed"),  # what a session returns
}
"""Parameters in messages that no option sets."""
CHECKED = sorted(set(PACKAGES) - {"rl_app_ppo"})


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings of a module, except docstrings and the keys of verl."""
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for keyword in (node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "verl"):
        left_out |= {id(node) for node in ast.walk(keyword.value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.lineno, node.value


def found(text: str) -> list[str]:
    dotted = [match for match in KEYS.findall(text) if "." in match]
    return [*dotted, *ALONE.findall(text)]


@functools.cache
def modules(package: str) -> list[tuple[Path, ast.Module]]:
    paths = sorted(Path(PACKAGES[package]).rglob("*.py"))
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def parameters() -> dict[str, set[str]]:
    """Public class or function of the packages -> its parameters."""
    own: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for node in (node for package in CHECKED for _, tree in modules(package) for node in tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own[node.name] |= arguments(node)
        elif isinstance(node, ast.ClassDef):
            own[node.name] |= set(members(node))
            bases[node.name] |= {base.id for base in node.bases if isinstance(base, ast.Name)}
    for name, above in bases.items():
        while above:
            parent = above.pop()
            own[name] |= own.get(parent, set())
            above |= bases.get(parent, set())
    return {name: found for name, found in own.items() if not name.startswith("_")}


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}


def members(kind: ast.ClassDef) -> Iterator[str]:
    for node in kind.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            yield from arguments(node) if node.name in ("__init__", "open") else ()


def named() -> Iterator[tuple[str, str, str]]:
    """(place, class or function, parameter) of each parameter in a text of a package."""
    known = parameters()
    for package in CHECKED:
        for path, tree in modules(package):
            for line, text in texts(tree):
                for owner, name in PARAMETER.findall(text):
                    if owner in known:
                        yield f"{path.name}:{line}", owner, name


@pytest.mark.parametrize("package", CHECKED)
def test_messages_name_no_key_of_the_app(package: str) -> None:
    printed = [
        f"{path}:{line}: {key}" for path, tree in modules(package) for line, text in texts(tree) for key in found(text)
    ]
    assert printed == []


def test_parameters_in_messages_exist() -> None:
    known = parameters()
    assert known["ActorConfig"] > {"policy_loss", "ppo_epochs"}, "those of its base class too"
    assert [f"{place}: {owner}.{name}" for place, owner, name in named() if name not in known[owner]] == []


def test_users_of_the_app_see_a_key_for_each_parameter() -> None:
    names = {f"{owner}.{name}" for _, owner, name in named()}
    assert {name for name in names if with_full_keys(name) == name} == WITHOUT_KEY


def test_keys_are_found_in_sentences_and_not_in_other_names() -> None:
    assert found("raise transfer_queue.capacity_mb.") == ["transfer_queue.capacity_mb"]
    assert found("set model_engine=torch") == ["model_engine="]
    assert found("TransferQueueConfig.capacity_mb, rl_x.rollout.n, rollout.name_of, model.safetensors") == []
