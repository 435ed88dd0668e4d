"""Advantage estimators by name: `ADVANTAGE_ESTIMATORS.get("grpo").estimate(inputs)`.

All arithmetic is float64. Packages add estimators as entry points in the group
`rl_trainer.advantage_estimators`, each an `Estimator`.
"""

from rl_trainer.algorithms.advantages.best_of_n import grpo_passk, raft
from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate, Estimator, whiten
from rl_trainer.algorithms.advantages.gae import gae
from rl_trainer.algorithms.advantages.gdpo import gdpo
from rl_trainer.algorithms.advantages.gpg import gpg
from rl_trainer.algorithms.advantages.grpo import dr_grpo, grpo, lite_ppo
from rl_trainer.algorithms.advantages.maxrl import maxrl
from rl_trainer.algorithms.advantages.opd import opd
from rl_trainer.algorithms.advantages.opo import opo
from rl_trainer.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from rl_trainer.algorithms.advantages.per_role.rae import rae, role_baselines
from rl_trainer.algorithms.advantages.per_turn.gigpo import gigpo
from rl_trainer.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from rl_trainer.algorithms.advantages.remax import remax
from rl_trainer.algorithms.advantages.rloo import rloo
from rl_trainer.config import AlgorithmConfig
from rl_trainer.config.registry import Registry

_BY_STD = ("norm_adv_by_std_in_grpo",)

ADVANTAGE_ESTIMATORS: Registry[Estimator] = Registry(
    "AlgorithmConfig.adv_estimator",
    "rl_trainer.advantage_estimators",
    Estimator,
    {
        "gae": Estimator(gae, reads=("values",), settings=("gamma", "lam")),
        "grpo": Estimator(grpo, compares=True, settings=_BY_STD),
        "dr_grpo": Estimator(dr_grpo, compares=True),
        "grpo_passk": Estimator(grpo_passk, compares=True, settings=_BY_STD),
        "rloo": Estimator(rloo, compares=True),
        "reinforce_plus_plus": Estimator(reinforce_plus_plus, settings=("gamma",)),
        "reinforce_plus_plus_baseline": Estimator(reinforce_plus_plus_baseline, compares=True),
        "remax": Estimator(remax, reads=("reward_baselines",)),
        "opo": Estimator(opo, compares=True),
        "maxrl": Estimator(maxrl, compares=True, nonnegative=True),
        "lite_ppo": Estimator(lite_ppo, compares=True),
        "gpg": Estimator(gpg, compares=True),
        "gdpo": Estimator(gdpo, reads=("reward_components",), compares=True, settings=_BY_STD),
        "gigpo": Estimator(gigpo, compares=True, settings=("gamma", *_BY_STD)),
        "rae": Estimator(rae, reads=("data_source", "extra_info")),
        "optimal_token_baseline": Estimator(
            optimal_token_baseline, reads=("old_log_probs", "sum_pi_squared"), compares=True
        ),
        "raft": Estimator(raft),
        "opd": Estimator(opd, reads=("ref_log_prob", "old_log_probs")),
    },
    elsewhere={
        "grpo_vectorized": "grpo",
        "rloo_vectorized": "rloo",
        "tir_optimal_token_baseline": "optimal_token_baseline",
        "drgrpo": "dr_grpo",
        "liteppo": "lite_ppo",
        "passk": "grpo_passk",
        "reinforce++": "reinforce_plus_plus",
    },
)


def estimators_read(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """The columns that the estimators of a run read, each once.

    Raises:
        ConfigError: an estimator is unknown.
    """
    reads = (ADVANTAGE_ESTIMATORS.get(one.adv_estimator).reads for one in algorithm.variants)
    return tuple(dict.fromkeys(name for names in reads for name in names))


def estimators_use(algorithm: AlgorithmConfig, setting: str) -> bool:
    """Whether an estimator of a run uses one of the settings that `Estimator.settings` names.

    Raises:
        ConfigError: an estimator is unknown.
    """
    return any(
        setting in ADVANTAGE_ESTIMATORS.get(one.adv_estimator).settings for one in algorithm.variants if one.rl_coef
    )


__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageInputs",
    "Estimate",
    "Estimator",
    "dr_grpo",
    "estimators_read",
    "estimators_use",
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "lite_ppo",
    "maxrl",
    "opd",
    "opo",
    "optimal_token_baseline",
    "rae",
    "raft",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "role_baselines",
    "whiten",
]
