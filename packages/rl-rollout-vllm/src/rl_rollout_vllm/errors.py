"""Errors of this package.

RLError
└── RolloutError                            an engine could not generate
    ├── VLLMUnavailableError (ImportError)  vLLM is missing, doubled or of another version
    ├── EngineDiedError                     the engine's process is gone
    └── TornWeightsError                    an update broke off midway: the weights belong to no version
"""

from __future__ import annotations

from rl_protocol.errors import RolloutError


class VLLMUnavailableError(RolloutError, ImportError):
    """vLLM can't be used here; says what is installed and what to install."""


class EngineDiedError(RolloutError):
    """The engine's process ended; this engine answers nothing any more, make a new one."""


class TornWeightsError(RolloutError):
    """An update of the weights broke off midway. Nothing is generated until a later update succeeds."""
