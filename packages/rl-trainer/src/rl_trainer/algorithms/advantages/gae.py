"""GAE: generalized advantage estimation with a critic."""

from __future__ import annotations

from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate, whiten


def gae(inputs: AdvantageInputs) -> Estimate:
    """GAE (Schulman et al. 2016, arXiv:1506.02438, eq. 11 to 16), whitened over the batch.

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
    A_t = delta_t + gamma lam A_{t+1},  R_t = A_t + V(s_t).
    t + 1 is the next token that the policy generated, possibly in the session's next trajectory.
    V after the last token is 0.

    Raises:
        ConfigError: there are no values.
    """
    e = inputs.episodes
    values = inputs.gather(inputs.require("values", "Use algorithm=ppo, which adds a critic."))
    delta = inputs.rewards() + inputs.gamma * e.next_values(values) - values
    advantages = e.discounted_sums(delta, inputs.gamma * inputs.lam)
    return inputs.scatter(whiten(advantages)), inputs.scatter(advantages + values)
