"""Warnings about a run that does not learn: each is printed once, with the key to check."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from rl_trainer.driver.hooks import Hook

logger = logging.getLogger(__name__)


class TrainingWarnings:
    """Checks the metrics of each step, and warns when a symptom first appears.

    Args:
        warn: prints one line.
        tools: the session has tools.
        reward_log: the log of all failures of the reward function, for the message.
    """

    def __init__(self, warn: Callable[[str], None], *, tools: bool, reward_log: Path) -> None:
        self._warn = warn
        self._tools = tools
        self._reward_log = reward_log
        self._seen: set[str] = set()
        self.reward_failures = 0
        """Responses on which the reward function has failed."""

    @property
    def seen(self) -> bool:
        """Whether any symptom has appeared."""
        return bool(self._seen)

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the metrics of a step."""
        for name, text in self._found(metrics).items():
            self._say(name, f"step {step}: {text}")

    def reward_failed(self, step: int, failed: int, scored: int, example: str) -> None:
        """Count and report failures of the reward function in a step."""
        self.reward_failures += failed
        self._say(
            "reward",
            f"step {step}: reward.function failed on {failed} of {scored} responses, which have no score: it {example}. "
            f"Each failure is in {self._reward_log}",
        )

    def _found(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Symptom -> its message."""
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
    """Hook that passes failures of the reward function to `TrainingWarnings`."""

    def __init__(self, warnings: TrainingWarnings) -> None:
        self._warnings = warnings

    def on_reward_failure(self, step: int, failed: int, scored: int, example: str) -> None:
        self._warnings.reward_failed(step, failed, scored, example)


def _all_zero(metrics: Mapping[str, float], name: str) -> bool:
    return metrics.get(f"{name}/max") == 0.0 == metrics.get(f"{name}/min")
