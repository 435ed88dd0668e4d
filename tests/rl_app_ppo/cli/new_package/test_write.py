"""`rl new` writes packages whose tests pass and which load as the plug-ins that they are."""

from __future__ import annotations

import ast
import errno
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from trust import trust

from rl_app_ppo.cli.new_package.write import KINDS, write_package
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.inputs.session import session_of
from rl_protocol import ConfigError, OutputError
from rl_protocol.support.option_tree import list_options
from rl_protocol.support.plugins import check, read_allow_list
from rl_protocol.support.trusted_files import load_object

ROOT = Path(__file__).resolve().parents[4]


def names(kind: str) -> str:
    return f"my_{kind}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_is_whole_and_allows_itself(kind, tmp_path):
    folder = write_package(kind, names(kind), tmp_path)
    for path in folder.rglob("*.py"):
        ast.parse(path.read_text())
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    ((group, offered),) = project["entry-points"].items()
    (name, value), *_ = offered.items()
    module, _, attribute = value.partition(":")
    assert (project["name"], name, module) == (f"my-{kind}".replace("_", "-"), names(kind), names(kind))
    assert re.search(
        rf"^(def {attribute}\(|class {attribute}\b|{attribute} = )",
        (folder / "src" / module / "__init__.py").read_text(),
        re.M,
    )
    metadata = folder / "src" / f"{names(kind)}-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    point = importlib.metadata.EntryPoint(name, value, group)._for(importlib.metadata.Distribution.at(metadata))
    assert check(point, read_allow_list({"RL_PLUGINS": str(folder / "plugins.toml")})) is False
    assert not [path for path in folder.rglob("*") if "my_plugin" in path.name or "plugin_" in path.name]


def test_the_setting_of_the_readme_takes_names_from_the_group_of_the_entry_point(tmp_path):
    groups = {option.key: option.spec.plugins for option in list_options(AppConfig)}
    for kind, one in KINDS.items():
        readme = (write_package(kind, names(kind), tmp_path) / "README.md").read_text()
        (settings,) = re.findall(r"^rl train (?!--trust)(.+)$", readme, re.M)
        key, _, value = settings.split()[-1].partition("=")
        assert (groups[key], value.split(",")[-1]) == (one.group, names(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_works_where_it_lies_as_the_readme_says(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readme = (write_package(kind, names(kind), Path()) / "README.md").read_text()
    found = re.findall(r"^rl train --trust (\S+) (.* )?(\S+)=(\S+)$", readme, re.M)
    if kind in ("loss", "backend"):  # a function in a module of its own; processes of the plane, which load packages
        assert not found
        return
    ((file, before, key, value),) = found
    trust(Path(file))
    load_object(value.split(",")[-1], key)
    config = load_config([*before.split(), f"{key}={value}"])
    session_of(config, None)  # the model of the demo has a chat template where the session needs one


@pytest.mark.parametrize(
    ("kind", "shown"),
    [("backend", "docs/guides/data_plane.md"), ("weight_engine", "packages/rl-ckpt-engine/examples/weight_engine.py")],
)
def test_the_package_has_the_code_that_the_guide_shows(kind, shown, tmp_path):
    folder = write_package(kind, "file", tmp_path)
    written = ast.parse((folder / "src" / "file" / "__init__.py").read_text())
    text = (ROOT / shown).read_text()
    text = text.partition("```python\n")[2].partition("```")[0] if shown.endswith(".md") else text
    classes = {node.name: ast.unparse(node) for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    for node in written.body:
        if isinstance(node, ast.ClassDef):
            assert ast.unparse(node) == classes[node.name]


@pytest.mark.slow
def test_the_tests_of_each_package_pass(tmp_path):
    """As its README runs them, but for all kinds in one process."""
    folders = [write_package(kind, names(kind), tmp_path) for kind in KINDS]
    sources = os.pathsep.join(str(folder / "src") for folder in folders)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert not re.search("skipped|deselected", done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("rewards", "x", "Did you mean 'reward'"),
        ("reward", "My-Reward", "NAME must be a Python module name"),
        ("reward", "class", "NAME must be a Python module name"),
        ("reward", "../x", "NAME must be a Python module name"),
        ("reward", "json", "choose one of your own, such as my_json"),
        ("reward", "rl_trainer", "name of another package"),
        ("reward", "pytest", "NAME=pytest is the name of another package; choose one of your own, such as my_pytest."),
    ],
)
def test_what_cannot_be_written_is_refused(kind, name, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        write_package(kind, name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_stays_as_it_is(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        write_package("reward", "mine", tmp_path)
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(path, text, encoding):
        if path.name == "__init__.py":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        path.write_bytes(text.encode(encoding))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OutputError, match="mine can't be written: No space left on device"):
            write_package("reward", "mine", tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert write_package("reward", "mine", tmp_path).is_dir()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(OutputError, match="can't be written"):
        write_package("reward", "mine", Path(tmp_path / "no such folder"))
