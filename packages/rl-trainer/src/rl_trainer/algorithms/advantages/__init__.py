"""Advantage estimators over ragged data, by name: `ADVANTAGE_ESTIMATORS.get("grpo").estimate(inputs)`. All arithmetic is float64.

Packages offer more as entry points in the group `rl_trainer.advantage_estimators`, each an `Estimator`.
"""

from rl_trainer.algorithms.advantages.base import AdvantageInputs, Estimate, Estimator, whiten
from rl_trainer.algorithms.advantages.group import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from rl_trainer.algorithms.advantages.stepwise import gae, optimal_token_baseline, reinforce_plus_plus, remax
from rl_trainer.algorithms.registry import Registry

ADVANTAGE_ESTIMATORS: Registry[Estimator] = Registry(
    "algorithm.adv_estimator",
    "rl_trainer.advantage_estimators",
    Estimator,
    {
        "gae": Estimator(gae, reads=("values",)),
        "grpo": Estimator(grpo, compares=True),
        "dr_grpo": Estimator(dr_grpo, compares=True),
        "grpo_passk": Estimator(grpo_passk, compares=True),
        "rloo": Estimator(rloo, compares=True),
        "reinforce_plus_plus": Estimator(reinforce_plus_plus),
        "reinforce_plus_plus_baseline": Estimator(reinforce_plus_plus_baseline, compares=True),
        "remax": Estimator(remax, reads=("reward_baselines",)),
        "opo": Estimator(opo, compares=True),
        "gpg": Estimator(gpg, compares=True),
        "gdpo": Estimator(gdpo, reads=("reward_components",), compares=True),
        "optimal_token_baseline": Estimator(
            optimal_token_baseline, reads=("old_log_probs", "sum_pi_squared"), compares=True
        ),
    },
    elsewhere={
        "grpo_vectorized": "grpo",
        "rloo_vectorized": "rloo",
        "tir_optimal_token_baseline": "optimal_token_baseline",
        "drgrpo": "dr_grpo",
        "passk": "grpo_passk",
        "reinforce++": "reinforce_plus_plus",
    },
)

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageInputs",
    "Estimate",
    "Estimator",
    "dr_grpo",
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "whiten",
]
