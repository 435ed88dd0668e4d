"""The error hierarchy: structure, pickling, attributes."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re

import pytest

import rl_protocol
from rl_protocol import RLError, errors

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
