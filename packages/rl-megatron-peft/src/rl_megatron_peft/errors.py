"""Errors of this package.

RLError
├── ConfigError (ValueError)   a setting of LoraConfig, or a name that is no LoRA target (rl_protocol)
├── OutputError (OSError)      an adapter folder can't be written (rl_protocol)
└── AdapterError (ValueError)  an adapter folder or an adapter in memory contradicts itself
"""

from __future__ import annotations

from rl_protocol.errors import RLError


class AdapterError(RLError, ValueError):
    """An adapter is incomplete, damaged or not what its configuration says; carries `file` and `field`."""

    file: str
    field: str


def bad_file(file: str, field: str, why: str) -> AdapterError:
    """The error of a field of a file; `why` is a predicate without a full stop."""
    return AdapterError(f"{file}: {field} {why}.", file=file, field=field)
