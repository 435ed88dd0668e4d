"""Errors of this package.

RLError
└── RolloutError                            an engine could not generate
    ├── VLLMUnavailableError (ImportError)  vLLM is missing, installed twice, or of another version
    ├── EngineDiedError                     the engine's process is gone
    └── TornWeightsError                    an update broke off: the weights belong to no version
"""

from __future__ import annotations

from rl_protocol.errors import RolloutError


class VLLMUnavailableError(RolloutError, ImportError):
    """vLLM can't be used in this environment; says what is installed and what to install."""


class EngineDiedError(RolloutError):
    """The engine's process has ended; start a new engine."""


class TornWeightsError(RolloutError):
    """An update of the weights broke off. Nothing is generated until a later update succeeds."""
