"""What tells that a run is not learning: each is said once on the console, with the key to look at."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from rl_trainer.hooks import Hook

logger = logging.getLogger(__name__)


class Symptoms:
    """Looks at the metrics of each step, and warns of each symptom when it is first seen.

    Args:
        warn: takes one line.
        tools: the session offers tools.
        reward_log: where every failure of the reward function is listed.
    """

    def __init__(self, warn: Callable[[str], None], *, tools: bool, reward_log: Path) -> None:
        self._warn = warn
        self._tools = tools
        self._reward_log = reward_log
        self._seen: set[str] = set()
        self.reward_failures = 0
        """Responses on which the reward function has failed so far."""

    @property
    def seen(self) -> bool:
        """Whether there has been any."""
        return bool(self._seen)

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at a step; `metrics` are all that is logged of it."""
        for name, text in self._found(metrics).items():
            self._say(name, f"step {step}: {text}")

    def reward_failed(self, step: int, failed: int, scored: int, example: str) -> None:
        """The reward function has failed on some of the responses of a step."""
        self.reward_failures += failed
        self._say(
            "reward",
            f"step {step}: reward.function failed on {failed} of {scored} responses, which have no score: it {example}. "
            f"Each failure is in {self._reward_log}",
        )

    def _found(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Symptom -> what to say of it."""
        found: dict[str, str] = {}
        if metrics.get("critic/score/equal_groups") == 1.0 and _all_zero(metrics, "critic/advantages"):
            found["equal rewards"] = (
                "the responses to each prompt all have the same reward, so there is nothing to learn from; look at reward.function and at samples/, "
                "and raise rollout.n or rollout.temperature"
            )
        if metrics.get("response_length/truncated_ratio") == 1.0:
            found["truncation"] = (
                "every response was cut off at rollout.response_length; raise it, or see that the model ends with its end-of-sequence token"
            )
        if metrics.get("actor/grad_norm") == 0.0:
            found["gradient"] = (
                "the gradient of the policy is zero (actor/grad_norm), so its weights do not change; look at reward.function and "
                "algorithm.adv_estimator"
            )
        if self._tools and metrics.get("agent/tool_calls/max") == 0.0:
            found["tools"] = (
                "no response called a tool; look at rollout.session, and at whether the prompt tells the model how to call one"
            )
        return found

    def _say(self, name: str, text: str) -> None:
        if name not in self._seen:
            self._seen.add(name)
            logger.warning("%s", text)
            self._warn(f"warning: {text}")


class RewardFailures(Hook):
    """Hands failures of the reward function on to `Symptoms`."""

    def __init__(self, symptoms: Symptoms) -> None:
        self._symptoms = symptoms

    def on_reward_failure(self, step: int, failed: int, scored: int, example: str) -> None:
        """See Hook."""
        self._symptoms.reward_failed(step, failed, scored, example)


def _all_zero(metrics: Mapping[str, float], name: str) -> bool:
    return metrics.get(f"{name}/max") == 0.0 == metrics.get(f"{name}/min")
