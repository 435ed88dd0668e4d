"""The shared secret of engine `tcp`, read from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rl_protocol.support.shared_secret import Secret, SecretSource

KEY_FILE = "RL_CKPT_KEY_FILE"
KEY = "RL_CKPT_KEY"
_SOURCE = SecretSource(KEY, KEY_FILE, "the weight synchronization", "the sender and all receivers")
HOW_TO_SET = _SOURCE.how_to_set


def load_key(environment: Mapping[str, str] = os.environ) -> Secret:
    """The key of this process, empty if none is set.

    Raises:
        ConfigError: see SecretSource.read.
    """
    return Secret(_SOURCE.read(environment))
