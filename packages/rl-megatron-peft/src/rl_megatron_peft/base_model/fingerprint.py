"""Fingerprint of a base model's weights, read without torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rl_protocol.errors import ConfigError

SAMPLE = 4096
"""Bytes hashed of each tensor, from its middle: training changes them, and hashing stays fast."""


def fingerprint(folder: Path) -> str:
    """Return a sha256 over name, element type, shape and a sample of every tensor of a checkpoint.

    It does not depend on how the tensors are distributed over files.

    Raises:
        ConfigError: a file is missing or is not a safetensors file.
    """
    tensors: dict[str, str] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no safetensors file, so it can't be fingerprinted.", field=str(folder))
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
