"""The secret that the processes of one weight synchronisation share when they meet over a network."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rl_protocol.secret import Secret, SecretSource

KEY_FILE = "RL_CKPT_KEY_FILE"
KEY = "RL_CKPT_KEY"
_SOURCE = SecretSource(KEY, KEY_FILE, "the weight synchronisation", "the sender and all receivers")
HOW_TO_SET = _SOURCE.how_to_set


def load_key(environment: Mapping[str, str] = os.environ) -> Secret:
    """The key that this process was given, if any.

    Raises:
        ConfigError: see SecretSource.read.
    """
    return Secret(_SOURCE.read(environment))
