"""Settings of the demo's base model, and their hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import version

from rl_protocol import ConfigError

RECIPE = 2
"""Increase it if a change of the code makes another model from the same settings."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Shape of the demo's Qwen2 model; the defaults have 333,184 parameters."""

    hidden_size: int = 128
    intermediate_size: int = 256
    layers: int = 2
    heads: int = 4
    context: int = 64
    """Most tokens of prompt and response together."""
    rope_theta: float = 100.0
    initializer_range: float = 0.06
    """Standard deviation of the initial weights; the usual 0.02 needs three times the warm-up."""


@dataclass(frozen=True, kw_only=True)
class WarmUpSettings:
    """The supervised warm-up that makes the base model.

    Some of its targets are careless answers, so the base model can give the right answer but
    prefers the careless one.
    """

    demo: str = "addition"
    """Name of the task in DEMOS."""
    seed: int = 0
    """Seed of the initial weights, the order of problems, and the choice of careless targets."""
    data_seed: int = 0
    train_size: int = 4000
    """Size of the training split."""
    validation_size: int = 512
    """Size of the validation split, which is never trained on."""
    target_probability: float = 0.43
    """The warm-up ends when the mean probability of the right answer reaches this value.

    It is measured on training problems. A perfectly trained model would reach
    0.30 + 0.70 * (1 - careless_share) = 0.475 with sums and addition, where careless answers can be
    right, and about 1 - careless_share with countdown and the calculator.
    """
    max_steps: int = 400
    """Most steps; about 200 are usual with addition and countdown, 280 with sums."""
    batch_size: int = 192
    """Problems per step."""
    careless_share: float = 0.75
    """Probability of a careless target, drawn each time a problem is shown."""
    lr: float = 2e-3
    lr_warmup_steps: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    check_every: int = 10
    """Steps between two measurements."""
    model: ModelSettings = field(default_factory=ModelSettings)

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "train_size", "validation_size", "lr_warmup_steps", "check_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of the warm-up must be at least 1; got {getattr(self, name)!r}.")
        for name in ("careless_share", "target_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} of the warm-up must be in [0, 1]; got {getattr(self, name)!r}.")


def content_hash(settings: WarmUpSettings) -> str:
    """Hash of everything that determines the base model: settings, recipe, torch and transformers.

    The number of threads is left out: it changes only rounding errors.
    """
    content = asdict(settings)
    content |= {"recipe": RECIPE, "torch": version("torch"), "transformers": version("transformers")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
