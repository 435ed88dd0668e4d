"""Warnings about a run that goes wrong: each is printed once, with the key to check."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from rl_app_ppo.config.full_keys import with_full_keys
from rl_app_ppo.outputs.symptoms import KEPT, symptoms
from rl_trainer.driver.hooks import Hook

logger = logging.getLogger(__name__)


class TrainingWarnings:
    """Checks the metrics of each step, and warns when a symptom first appears.

    Args:
        warn: prints one line.
        tools: the session has tools.
        reward_log: the log of all failures of the reward function, for the message.
        rewarded: the policy learns from the rewards of several responses.
        reward: the setting of rewards, and where their functions are, for the message.
        target_kl: algorithm.kl_ctrl.target_kl, nats per token; None: there is no target.
        record: records a symptom by name and text.
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        *,
        tools: bool,
        reward_log: Path,
        rewarded: bool = True,
        reward: str = "reward.function",
        target_kl: float | None = None,
        record: Callable[[str, str], None] | None = None,
    ) -> None:
        self._warn = warn
        self._tools = tools
        self._reward_log = reward_log
        self._rewarded = rewarded
        self._reward = reward
        self._target_kl = target_kl
        self._record = record
        self._seen: set[str] = set()
        self._first: Mapping[str, float] = {}
        """Metrics of the first training step."""
        self._last = deque[Mapping[str, float]](maxlen=KEPT)
        self.reward_failures = 0
        """Responses on which the reward function has failed."""

    @property
    def seen(self) -> bool:
        """Whether any symptom has appeared."""
        return bool(self._seen)

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the metrics of a step."""
        if not step:  # validation before training
            return
        self._last.append(metrics)
        self._first = self._first or metrics
        found = symptoms(
            self._first,
            list(self._last),
            tools=self._tools,
            first_step=step == 1,
            rewarded=self._rewarded,
            reward=self._reward,
            target_kl=self._target_kl,
        )
        for name, text in found.items():
            self._say(name, f"step {step}: {text}")

    def reward_failed(self, step: int, failed: int, scored: int, example: str) -> None:
        """Count and report failures of the reward function in a step."""
        self.reward_failures += failed
        self._say(
            "reward",
            f"step {step}: reward.function failed on {failed} of {scored} responses, which have no score: it {example}. "
            f"Each failure is in {self._reward_log}",
        )

    def _say(self, name: str, text: str) -> None:
        if name not in self._seen:
            self._seen.add(name)
            logger.warning("%s", text)
            self._warn(f"warning: {with_full_keys(text)}")
            if self._record is not None:
                self._record(name, text)


class RewardFailures(Hook):
    """Hook that passes failures of the reward function to `TrainingWarnings`."""

    def __init__(self, warnings: TrainingWarnings) -> None:
        self._warnings = warnings

    def on_reward_failure(self, step: int, failed: int, scored: int, example: str) -> None:
        self._warnings.reward_failed(step, failed, scored, example)
