"""Replaces the values of secret environment variables in what is written for people."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_SHORTEST = 8
"""Shorter values are words and numbers, such as `true`."""


class Redaction:
    """Finds the values of variables whose names say that they are secret.

    Args:
        environment: the variables.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        named = [(value, name) for name, value in environment.items() if _SECRET.search(name)]
        self._values = {
            form: f"[{name}]".encode()
            for value, name in named
            if len(value) >= _SHORTEST
            for form in (
                value.encode(),
                *(json.dumps(value, ensure_ascii=ascii)[1:-1].encode() for ascii in (False, True)),
            )
        }

    def clean(self, text: bytes) -> bytes:
        """The text, UTF-8 or JSON, with `[NAME]` for the value of each such variable."""
        for value, name in self._values.items():
            text = text.replace(value, name)
        return text
