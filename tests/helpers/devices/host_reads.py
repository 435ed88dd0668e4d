"""Where the host waits for a GPU because it needs a value from there: found by the two stand-ins of
a GPU (`fake_gpu`, `standin_device`), and listed with reasons in HOST_READS.toml.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

_SOURCES = "/packages/", "/src/rl_"
_ops: Any = torch.ops.aten


class HostRead(NamedTuple):
    """A place where the host waits for the GPU."""

    where: str
    """`package/folder/module.py:function` of the innermost frame in this repository's packages;
    `elsewhere`: there is none.
    """
    what: str
    """`scalar` (item, float, int, bool of a tensor, or a branch on one), `copy` to the CPU, `index
    by a mask`, or the operation whose shape depends on values.
    """
    through: str = ""
    """The library that reads, where that frame calls one; empty: the frame itself, or torch for it.
    """


SHAPED_BY_VALUES = {
    _ops.nonzero.default: "nonzero",
    _ops.masked_select.default: "masked_select",
    _ops.equal.default: "equal",
    _ops.unique_consecutive.default: "unique_consecutive",
    _ops._unique2.default: "unique",
    _ops.repeat_interleave.Tensor: "repeat_interleave",
}
"""Operations whose shape or result the host needs -> what they are called in a HostRead."""


def running(what: str) -> HostRead:
    """The read of the product's function that runs now."""
    through, frame = "", sys._getframe(1)
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if all(part in file for part in _SOURCES):
            return HostRead(f"{file.rpartition('/src/')[2]}:{function.partition('.<locals>')[0]}", what, through)
        library = file.rpartition("/site-packages/")[2].partition("/")[0] if "/site-packages/" in file else ""
        through = library if library != "torch" and library else through
        frame = frame.f_back
    return HostRead("elsewhere", what)
