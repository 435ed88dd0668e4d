"""Errors of this package.

RLError
└── RolloutError                            an engine could not generate
    └── VLLMUnavailableError (ImportError)  vLLM is missing, doubled or of another version
"""

from __future__ import annotations

from rl_protocol.errors import RolloutError


class VLLMUnavailableError(RolloutError, ImportError):
    """vLLM can't be used here; says what is installed and what to install."""
