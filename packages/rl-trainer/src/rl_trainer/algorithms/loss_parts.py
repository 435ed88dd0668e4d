"""The parts of a token's loss, and their weights: rl, ce and ref_kl.

`rl` is the policy loss, `ce` the cross-entropy of the token, and `ref_kl` the divergence from the
reference policy. Tokens that the data gave (demonstrations), and those that the environment of an
agent gave (observations) where they are trained on, have the part `ce`; all others have `rl` and
`ref_kl`. A part whose weight is the same for all tokens needs no column.
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
        demonstrations: their cross-entropy.
        observations: their cross-entropy.
        columns: weights that differ between tokens.
    """

    rl: bool
    demonstrations: bool
    observations: bool
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCoefs:
    """float32 [T] or a number: the coefficients of the settings for each token's row."""

    rl: npt.NDArray[np.float32] | np.float32
    sft: npt.NDArray[np.float32] | np.float32
    echo: npt.NDArray[np.float32] | np.float32
    ref_kl: npt.NDArray[np.float32] | np.float32


def loss_parts(algorithm: AlgorithmConfig, actor: ActorConfig) -> LossParts:
    """The parts of a run with these settings."""
    rl, demonstrations, observations = algorithm.trains_policy, algorithm.demonstrates, algorithm.trains_observations
    ce = demonstrations or observations
    weighted = {
        "rl_weights": rl and (ce or any(one.rl_coef != 1 for one in algorithm.variants)),
        "ce_weights": ce,
        "ref_kl_weights": actor.use_kl_loss and (ce or any(algorithm.ref_kl_coef(s) != 1 for s in algorithm.sources)),
    }
    return LossParts(
        rl=rl,
        demonstrations=demonstrations,
        observations=observations,
        columns=tuple(name for name, needed in weighted.items() if needed),
    )


def has_weights(algorithm: AlgorithmConfig) -> bool:
    """Whether the weight of any part can differ between tokens, or from 1."""
    plain = all(one.rl_coef == 1 for one in algorithm.variants)
    return bool(algorithm.by_source) or algorithm.demonstrates or algorithm.trains_observations or not plain


def part_weights(
    demonstration: BoolArray, observation: BoolArray, coefs: PartCoefs
) -> Mapping[str, npt.NDArray[np.float32]]:
    """The weights [T] of each part; `demonstration` and `observation` [T] are true for tokens that
    the data and the environment gave.
    """
    given, observed = demonstration.astype(np.float32), observation.astype(np.float32)
    own = 1 - given - observed
    return {
        "rl_weights": coefs.rl * own,
        "ce_weights": coefs.sft * given + coefs.echo * observed,
        "ref_kl_weights": coefs.ref_kl * own,
    }
