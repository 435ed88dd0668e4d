"""Errors of this package.

RLError
├── ConfigError (ValueError)   a wrong LoraConfig setting or target name (rl_protocol)
├── OutputError (OSError)      an adapter folder can't be written (rl_protocol)
└── AdapterError (ValueError)  an adapter, in a folder or in memory, contradicts itself
"""

from __future__ import annotations

from pathlib import Path

from rl_protocol.errors import RLError


class AdapterError(RLError, ValueError):
    """An adapter is incomplete, damaged or does not match its configuration.

    Attributes:
        file: the file or folder that is wrong.
        field: the field or tensor in it.
    """

    file: str
    field: str


def bad_file(file: Path | str, field: str, why: str) -> AdapterError:
    """Return the error for a field of a file; `why` is a predicate, such as `is missing`."""
    return AdapterError(f"{file}: {field} {why.removesuffix('.')}.", file=str(file), field=field)
