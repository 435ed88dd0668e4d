"""RAE: the score relative to the running mean of the role that was played."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rl_protocol import ConfigError
from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate
from rl_trainer.algorithms.arrays import FloatArray


def rae(inputs: AdvantageInputs) -> Estimate:
    """Role-conditioned advantage estimation (SPIRAL, Liu et al. 2025, arXiv:2506.24119).

    score - b, where b is the running mean of the scores of the role: a data source, and the `role`
    in the row's extra_info. Sides of a game that win unequally often each have their own baseline,
    and one response per prompt is enough.

    As in the authors' program, a session is compared with the mean before it is part of it. Means
    begin with 0.

    Raises:
        ConfigError: the roles are missing.
    """
    baselines, _ = role_baselines(inputs)
    return inputs.session_advantages(inputs.session_scores() - baselines)


def role_baselines(inputs: AdvantageInputs) -> tuple[FloatArray, Mapping[str, float]]:
    """[S] the running mean of the role of each session before the session, and the means of all
    roles after the batch: b <- role_decay * b + (1 - role_decay) * score, in the order of the
    sessions. A session without tokens to train on is left out.

    Raises:
        ConfigError: the roles are missing.
    """
    e, scores, means = inputs.episodes, inputs.session_scores(), dict(inputs.role_means)
    if inputs.roles is None:
        raise ConfigError("AlgorithmConfig.adv_estimator=rae needs the roles of the prompts; got none.")
    before = np.zeros(scores.size)
    for session, row in enumerate(e.final_row):
        role = inputs.roles[int(row)]
        mean = before[session] = means.get(role, 0.0)
        if e.nonempty[session]:
            means[role] = inputs.role_decay * mean + (1 - inputs.role_decay) * float(scores[session])
    return before, means
