"""The allow-list of plug-ins: entries, messages, and the printed list."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_protocol import ConfigError
from rl_protocol.support.plugins import ALLOW_FILE, check_installed, fingerprint, installed_plugins, load_installed

GROUP = "rl_x.things"


@pytest.fixture
def point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> importlib.metadata.EntryPoint:
    """An entry point of an installed distribution with one module."""
    site, info = tmp_path / "site", tmp_path / "site" / "my_things-1.2.dist-info"
    info.mkdir(parents=True)
    (site / "my_things.py").write_text("it = 42\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-things\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nit = my_things:it\n")
    (info / "RECORD").write_text("my_things.py,,\nmy_things-1.2.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "my_things", raising=False)
    (found,) = importlib.metadata.entry_points(group=GROUP)
    return found


@pytest.fixture
def listed(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Text of an allow-list -> the environment that points to it."""

    def write(text: str) -> dict[str, str]:
        (tmp_path / "plugins.toml").write_text(text)
        return {ALLOW_FILE: str(tmp_path / "plugins.toml")}

    return write


def entry(**facts: str) -> str:
    return f"[{GROUP}.it]\n" + "".join(f'{key} = "{value}"\n' for key, value in facts.items())


def test_installed_plug_ins_are_read_once_and_again_when_the_path_changes(tmp_path, monkeypatch):
    def install(name: str) -> None:
        info = tmp_path / name / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = module:thing\n")
        monkeypatch.syspath_prepend(tmp_path / name)

    reads: list[None] = []
    entry_points = importlib.metadata.entry_points
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: reads.append(None) or entry_points())
    install("one")
    assert [installed_plugins(group).names for group in (GROUP, GROUP, "rl_x.others")] == [{"one"}, {"one"}, set()]
    assert len(reads) == 1
    install("two")
    assert installed_plugins(GROUP).names == {"one", "two"}


def test_what_is_allowed_loads_pinned_or_not(point, listed):
    assert not check_installed(point, listed(entry(distribution="My_Things")))
    assert "my_things" not in sys.modules, "a check imports nothing"
    assert load_installed(point, listed(entry(distribution="my-things", version="1.2"))) == 42
    del sys.modules["my_things"]
    pinned = listed(entry(distribution="my-things", sha256=fingerprint(point.dist)))
    assert check_installed(point, pinned)
    assert load_installed(point, pinned) == 42


def test_plug_ins_of_the_stack_need_no_permission(point, tmp_path):
    """The stack's own plug-ins are trusted; a distribution with only a similar name is not."""
    metadata = tmp_path / "site" / "my_things-1.2.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: RL_Trainer\nVersion: 1.2\n")
    (ours,) = importlib.metadata.entry_points(group=GROUP)
    assert load_installed(ours, {}) == 42
    metadata.write_text("Metadata-Version: 2.1\nName: rl-trainer-extras\nVersion: 1.2\n")
    (others,) = importlib.metadata.entry_points(group=GROUP)
    with pytest.raises(ConfigError, match="installed but not allowed"):
        check_installed(others, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r'installed but not allowed.*\[rl_x\.things\.it\] distribution = "my-things"'),
        ("[rl_x.others.it]\ndistribution = 'my-things'", "installed but not allowed"),
        ("[rl_x.things.its]\ndistribution = 'my-things'", "installed but not allowed"),
        (entry(distribution="your-things"), "another distribution than allowed"),
        (entry(distribution="my-things", version="1.3"), r"has version 1\.2; allowed is 1\.3"),
        (entry(distribution="my-things", sha256="0" * 64), "was changed on disk"),
        (entry(distribution="my-things", sha="0"), "can't be read: .*unknown field `sha`"),
        ("[rl_x]\nit = 3", "can't be read"),
    ],
)
def test_anything_else_does_not_and_is_not_imported(point, listed, text, message):
    for environment in (listed(text), {} if "not allowed" in message else listed(text)):
        with pytest.raises(ConfigError, match=message):
            load_installed(point, environment)
    assert "my_things" not in sys.modules


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("it = {}['table']", r"KeyError: 'table' \(.*my_things\.py:1\)\. Repair it"),
        ("import json\njson.loads('{')\nit = 1", r"JSONDecodeError: .* \(.*my_things\.py:2\)\. Repair it"),
        ("raise SystemExit(3)", r"SystemExit: 3 \(.*my_things\.py:1\)\. Repair it"),
        ("def it(:\n", r"SyntaxError: invalid syntax \(my_things\.py, line 1\)\. Repair it"),
        (
            "from rl_protocol import of_an_older_release",
            r"ImportError: cannot import .* Repair it, or install a version",
        ),
        ("that = 1", r"AttributeError: module 'my_things' has no attribute 'it'\. Repair it"),
        ("\nimport no_such_module_here", r"No module named .* \(.*my_things\.py:2\)\. Install its dependencies\."),
    ],
)
def test_what_a_plug_in_raises_when_it_is_imported_is_said_with_its_line(point, listed, tmp_path, code, message):
    (tmp_path / "site" / "my_things.py").write_text(code)
    with pytest.raises(ConfigError, match=rf"The plug-in 'it' \(my_things:it of my-things 1\.2\) can't be .*{message}"):
        load_installed(point, listed(entry(distribution="my-things")))


def test_a_plug_in_with_an_extra_of_its_name_says_how_to_install_it(point, listed, tmp_path):
    site = tmp_path / "site"
    (site / "my_things.py").write_text("import no_such_module_here")
    metadata = next(site.glob("*.dist-info")) / "METADATA"
    metadata.write_text(metadata.read_text() + "Provides-Extra: it\n")
    with pytest.raises(ConfigError, match=r"No module named .* Install my-things\[it\]\."):
        load_installed(point, listed(entry(distribution="my-things")))


def test_a_list_that_everybody_may_write_is_refused(point, listed, tmp_path):
    environment = listed(entry(distribution="my-things"))
    (tmp_path / "plugins.toml").chmod(0o666)
    with pytest.raises(ConfigError, match="is world-writable"):
        load_installed(point, environment)


def test_what_is_printed_is_a_list_that_allows_what_is_there_now(point, listed, tmp_path):
    printed = subprocess.run(
        [sys.executable, "-m", "rl_protocol.support.plugins", "rl_x"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    assert printed.count("[") == 1, "of the packages that were named alone"
    assert check_installed(point, listed(printed)), "pinned"
    (tmp_path / "site" / "my_things.py").write_text("it = 43\n")
    with pytest.raises(ConfigError, match="was changed on disk"):
        check_installed(point, listed(printed))
