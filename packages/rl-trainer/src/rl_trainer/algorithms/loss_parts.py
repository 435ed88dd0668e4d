"""The parts of a token's loss, and their weights: rl, ce and ref_kl.

`rl` is the policy loss, `ce` the cross-entropy of the token, and `ref_kl` the divergence from the
reference policy. Tokens that the data gave (demonstrations) have the part `ce`, all others have
`rl` and `ref_kl`. A part whose weight is the same for all tokens needs no column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_trainer.algorithms.arrays import BoolArray
from rl_trainer.config import ActorConfig, AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts:
    """Which parts a run trains.

    Attributes:
        rl: the policy loss, and so advantages.
        ce: the cross-entropy of demonstrations.
        columns: weights that differ between tokens.
    """

    rl: bool
    ce: bool
    columns: tuple[str, ...]


def loss_parts(algorithm: AlgorithmConfig, actor: ActorConfig) -> LossParts:
    """The parts of a run with these settings."""
    rl, ce = algorithm.rl_coef > 0, algorithm.sft_coef > 0
    weighted = {
        "rl_weights": rl and (ce or algorithm.rl_coef != 1),
        "ce_weights": ce,
        "ref_kl_weights": actor.use_kl_loss and ce,
    }
    return LossParts(rl=rl, ce=ce, columns=tuple(name for name, needed in weighted.items() if needed))


def part_weights(demonstration: BoolArray, algorithm: AlgorithmConfig) -> Mapping[str, npt.NDArray[np.float32]]:
    """The weights [T] of each part; `demonstration` [T] is true for tokens that the data gave."""
    given = demonstration.astype(np.float32)
    return {
        "rl_weights": np.float32(algorithm.rl_coef) * (1 - given),
        "ce_weights": np.float32(algorithm.sft_coef) * given,
        "ref_kl_weights": 1 - given,
    }
