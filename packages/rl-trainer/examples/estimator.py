"""An advantage estimator of your own: score minus the median score of the prompt's responses."""

import numpy as np

from rl_protocol import RowKey
from rl_trainer.algorithms.advantages import AdvantageInputs, Estimator


def median_baseline(inputs):
    scores, group = inputs.session_scores(), inputs.episodes.group
    baseline = np.array([np.median(scores[group == prompt]) for prompt in range(inputs.episodes.num_groups)])
    return inputs.session_advantages(scores - baseline[group])  # each token has that of its response


ESTIMATOR = Estimator(median_baseline, compares=True)  # it compares responses: needs rollout.n > 1


def main():
    """Prompt a has three responses of 2, 1 and 1 tokens; prompt b has one."""
    keys = [RowKey("a", 0, 0), RowKey("a", 1, 0), RowKey("a", 2, 0), RowKey("b", 0, 0)]
    offsets, scores = np.array([0, 2, 3, 4, 5]), np.array([0.0, 1.0, 5.0, 3.0])
    inputs = AdvantageInputs(keys=keys, offsets=offsets, mask=np.ones(5, bool), scores=scores)
    advantages, _ = ESTIMATOR.estimate(inputs)
    print(advantages.tolist())


if __name__ == "__main__":
    main()
