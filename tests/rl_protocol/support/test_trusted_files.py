"""Files of code load where the user or the operator allows them, and as they were checked."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from rl_protocol import ConfigError
from rl_protocol.support.trusted_files import (
    check_object,
    given_files,
    load_object,
    names_file,
    read_trusted,
    trusted_files,
    variables_for,
)

CODE = "from math import tau\nX = 3\ntry:\n    import nothing_like_it\nexcept ImportError:\n    late = 5\n"
USES = (check_object, load_object)


def allow(*paths: Path) -> dict[str, str]:
    """The environment in which the user has allowed these files as they are now."""
    return variables_for(given_files(paths, "trust"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize("use", USES)
def test_a_file_loads_if_its_path_and_content_are_allowed(use, file, tmp_path):
    with pytest.raises(ConfigError, match=rf"A\.b='{file}': .*add --trust {file} to the command"):
        use(f"{file}:X", "A.b", {})
    other = tmp_path / "other.py"
    other.write_text(CODE)
    with pytest.raises(ConfigError, match="add --trust"):  # the same content elsewhere
        use(f"{file}:X", "A.b", allow(other))
    use(f"{file}:X", "A.b", {"RL_TRUSTED_FILES": json.dumps({str(file): sha256(CODE.encode()).hexdigest()})})
    use(f"{file}:X", "A.b", allow(other, file))


@pytest.mark.parametrize("use", USES)
def test_a_change_after_the_permission_is_noticed(use, file):
    allowed = allow(file)
    file.write_text(CODE + "\n")
    with pytest.raises(ConfigError, match=r"has sha256 [0-9a-f]{64} on this host; trusted is [0-9a-f]{64}"):
        use(f"{file}:X", "A.b", allowed)


@pytest.mark.parametrize("use", USES)
def test_the_target_of_a_link_counts_and_nobody_else_may_write_it(use, file, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link.py").symlink_to(file)
    with pytest.raises(ConfigError, match="add --trust"):
        use(f"{tmp_path}/open/link.py:X", "A.b", {})
    use(f"{tmp_path}/open/link.py:X", "A.b", allow(file))
    allowed = allow(file)
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod o-w"):
        use(f"{file}:X", "A.b", allowed)


def test_a_file_runs_once_and_its_classes_find_their_annotations(tmp_path):
    path = tmp_path / "my-file.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom collections.abc import Mapping\n"
        "@dataclass\nclass A:\n    x: Mapping[str, int]\nIT = A({})\n"
    )
    assert load_object(f"{path}:IT", "A.b", allow(path)) is load_object(f"{path}:IT", "A.b", allow(path))
    path.write_text(path.read_text() + "raise KeyError('late')\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match="can't be loaded: KeyError: 'late'"):
            load_object(f"{path}:IT", "A.b", allow(path))


def test_objects_are_those_of_the_file(file):
    assert [load_object(f"{file}:{name}", "A.b", allow(file)) for name in ("X", "late")] == [3, 5]
    for name in ("X", "late", "tau"):
        check_object(f"{file}:{name}", "A.b", allow(file))


def test_checking_runs_nothing(tmp_path):
    path = tmp_path / "loud.py"
    path.write_text("def it(): ...\nraise SystemExit('it ran')\n")
    check_object(f"{path}:it", "A.b", allow(path))


def test_a_module_that_is_not_installed_is_named_before_the_file_runs(tmp_path, monkeypatch):
    """Also one in the folder of the file, where Python does not look; not one that may fail."""
    (tmp_path / "next_to_it.py").write_text("")
    path = tmp_path / "mine.py"
    for statement, module in (
        ("import json, next_to_it.part", "next_to_it"),
        ("from nowhere.near import it", "nowhere"),
    ):
        path.write_text(f"from __future__ import annotations\nimport os.path\n{statement}\ndef score(): ...\n")
        with pytest.raises(ConfigError, match=rf"mine\.py, line 3 imports '{module}', which is not installed"):
            check_object(f"{path}:score", "A.b", allow(path))
    path.write_text("import next_to_it\nif 0:\n    import nowhere\ndef score(): ...\n")
    with pytest.raises(ConfigError, match=rf"set PYTHONPATH={tmp_path}"):
        check_object(f"{path}:score", "A.b", allow(path))
    monkeypatch.syspath_prepend(tmp_path)
    check_object(f"{path}:score", "A.b", allow(path))


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("def score(): ...\n", "scores", r"defines no 'scores'; it defines score\. Did you mean 'score'\?"),
        ("\n", "score", "it defines nothing"),
        ("def score(:\n", "score", "line 1: "),
    ],
)
@pytest.mark.parametrize("use", USES)
def test_what_is_wrong_with_a_file_is_said(use, code, name, message, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(code)
    with pytest.raises(ConfigError, match="can't be loaded" if code.endswith("(:\n") else message):
        use(f"{path}:{name}", "A.b", allow(path))


@pytest.mark.parametrize("name", ["gone.py:x", "gone.txt:x", "gone.py:not a name"])
def test_a_name_that_is_no_file_of_code(name):
    with pytest.raises(ConfigError, match=r"does not exist|must be path\.py:name"):
        load_object(name, "A.b", {})


def test_names_of_files():
    assert [names_file(name) for name in ("a.py:x", "/b/a.py:x", "a:x", "a.py", "grpo")] == [True, True] + [False] * 3


def test_a_damaged_variable_is_named():
    assert trusted_files({}) == {}
    with pytest.raises(ConfigError, match="RL_TRUSTED_FILES must be a JSON object"):
        trusted_files({"RL_TRUSTED_FILES": "near.py"})


def test_permissions_add_up_and_a_file_that_cannot_be_read_is_named(file, tmp_path, monkeypatch):
    other = tmp_path / "other.py"
    other.write_text("")
    monkeypatch.setenv("RL_TRUSTED_FILES", allow(file)["RL_TRUSTED_FILES"])
    assert trusted_files(allow(other)).keys() == {str(file), str(other)}
    assert variables_for({}) == {}
    with pytest.raises(ConfigError, match=r"--trust \S*gone\.py: the file can't be read: No such file"):
        given_files([tmp_path / "gone.py"], "--trust")


def test_the_content_that_was_checked_is_returned(file):
    assert read_trusted(str(file), "A.b", allow(file)) == (file, CODE.encode())
