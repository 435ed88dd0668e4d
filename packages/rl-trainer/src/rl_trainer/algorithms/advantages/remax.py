"""ReMax: the score of the greedy response as baseline."""

from __future__ import annotations

from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate


def remax(inputs: AdvantageInputs) -> Estimate:
    """ReMax (Li et al. 2023, arXiv:2310.10505).

    The sum of the rewards from a token on, minus the score of the greedy response to the prompt.

    Raises:
        ConfigError: there are no scores of greedy responses.
    """
    e = inputs.episodes
    greedy = inputs.require("reward_baselines", "They come from a greedy rollout of every prompt.")[e.final_row]
    returns = e.discounted_sums(inputs.rewards(), 1.0)
    return inputs.scatter(returns - e.per_token(greedy)), inputs.scatter(returns)
