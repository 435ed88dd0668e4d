"""Which base model an adapter belongs to: a short name for the weights of a checkpoint folder, read without torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rl_protocol.errors import ConfigError

SAMPLE = 4096
"""Bytes of each tensor that are looked at, from its middle: any training changes them, and a large model is still quick to name."""


def fingerprint(folder: Path) -> str:
    """sha256 over name, element type, shape and some bytes of every tensor; the same however the tensors are shared among files.

    Raises:
        ConfigError: a file is missing or is no safetensors file.
    """
    tensors: dict[str, str] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} has no safetensors file, so it is no model whose weights can be named.", field=str(folder)
        )
    for file in files:
        try:
            with file.open("rb") as opened:
                length = min(int.from_bytes(opened.read(8), "little"), file.stat().st_size)
                header = json.loads(opened.read(length))
                header.pop("__metadata__", None)
                for name, entry in header.items():
                    begin, end = entry["data_offsets"]
                    opened.seek(8 + length + begin + max(0, (end - begin - SAMPLE) // 2))
                    sample = hashlib.sha256(opened.read(min(SAMPLE, end - begin))).hexdigest()
                    tensors[name] = json.dumps([name, entry["dtype"], entry["shape"], sample])
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise ConfigError(f"{file}: file can't be read as safetensors: {error!r}.", field=str(file)) from error
    return hashlib.sha256("\n".join(tensors[name] for name in sorted(tensors)).encode()).hexdigest()
