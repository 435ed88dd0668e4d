"""The error hierarchy: structure, pickling, attributes."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import rl_protocol
from rl_protocol import RLError, WorkerError, errors
from rl_protocol.errors import user_code

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, RLError)]


def drawn_tree() -> dict[str, tuple[str, str | None]]:
    """Return name -> (parent, stdlib base), as drawn in the module's docstring."""
    lines = re.findall(r"^ {4}((?:│   |    )*)[├└]── (\w+)(?: \((\w+)\))?", errors.__doc__ or "", re.MULTILINE)
    out: dict[str, tuple[str, str | None]] = {"RLError": ("Exception", None)}
    above = ["RLError"]
    for indent, name, std in lines:
        depth = len(indent) // 4
        del above[depth + 1 :]
        out[name] = (above[depth], std or None)
        above.append(name)
    return out


def test_the_drawing_is_the_truth():
    drawn = drawn_tree()
    assert {c.__name__ for c in CLASSES} == set(drawn)
    for cls in CLASSES:
        parent, std = drawn[cls.__name__]
        names = [base.__name__ for base in cls.__bases__]
        assert names == [parent, std] if std else names == [parent]
        if std:
            assert issubclass(cls, getattr(builtins, std))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_errors_pickle_with_their_facts(cls: type[RLError]):
    error = cls("what was wrong", keys=["a", "b"], row=0)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == again.message == "what was wrong"
    assert (again.keys, again.row) == (["a", "b"], 0)
    with pytest.raises(RLError, match=r"^what was wrong$"):
        raise again


def test_every_error_is_public_and_documented():
    for cls in CLASSES:
        assert cls.__doc__
        assert cls.__name__ in rl_protocol.__all__


def test_user_code_raises_an_error_of_the_package_with_the_place() -> None:
    def broken() -> None:
        raise ValueError("no")

    with pytest.raises(WorkerError, match=r"^It raised ValueError: no\.$") as raised, user_code(as_worker_error):
        broken()
    assert isinstance(raised.value.__cause__, ValueError)
    given = RLError("as it is")
    with pytest.raises(RLError) as passed, user_code(as_worker_error):
        raise given
    assert passed.value is given
    with pytest.raises(KeyboardInterrupt), user_code(as_worker_error):
        raise KeyboardInterrupt


def test_user_code_names_the_line_in_another_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def broken():\n    1 / 0\n")
    names: dict[str, Any] = {"__name__": "mine"}
    exec(compile((tmp_path / "mine.py").read_text(), str(tmp_path / "mine.py"), "exec"), names)
    with pytest.raises(WorkerError, match=r"ZeroDivisionError: .* \(.*/mine\.py:2\)"), user_code(as_worker_error):
        names["broken"]()


def as_worker_error(raised: str) -> WorkerError:
    return WorkerError(f"It raised {raised}.")
