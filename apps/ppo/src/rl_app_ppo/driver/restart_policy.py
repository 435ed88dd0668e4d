"""When a process that died is replaced, and how often."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rl_app_ppo.config.restart import RestartConfig
from rl_protocol import WorkerDiedError
from rl_protocol.counted import counted

HOUR_S = 3600.0
LONGEST_WAIT_S = 60.0
"""Longest wait before a restart, whatever `restart.backoff_s` is doubled to."""


class RestartLimitError(WorkerDiedError):
    """A process has died that is not replaced any more: `restart.max_per_hour` is reached."""


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart that the policy allows.

    Attributes:
        number: of those within an hour; the first is 1.
        limit: most restarts within an hour.
        wait_s: seconds to wait before it.
    """

    number: int
    limit: int
    wait_s: float

    def __str__(self) -> str:
        return f"restart {self.number} of at most {self.limit} an hour, in {self.wait_s:g} s"


class RestartPolicy:
    """Counts the restarts of each process, and of the whole run.

    Only restarts of the last hour count. The wait doubles with each of them.

    Args:
        settings: limits.
        clock: seconds since any moment.

    Example:
        >>> policy = RestartPolicy(RestartConfig(max_per_hour=2, backoff_s=1.0))
        >>> [policy.next("rollout-0").wait_s for _ in range(2)]
        [1.0, 2.0]
        >>> policy.next("the run").wait_s
        1.0
    """

    def __init__(self, settings: RestartConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._times: dict[str, deque[float]] = {}

    @property
    def allows_any(self) -> bool:
        """Whether any process is ever replaced."""
        return self._settings.max_per_hour > 0

    def next(self, what: str) -> Restart:
        """Count a restart.

        Args:
            what: is restarted: the name of a worker, "the run", or "the data plane's controller".

        Raises:
            RestartLimitError: there were `restart.max_per_hour` of them in the last hour.
        """
        now, limit = self._clock(), self._settings.max_per_hour
        times = self._times.setdefault(what, deque())
        while times and times[0] <= now - HOUR_S:
            times.popleft()
        if not limit:
            raise RestartLimitError(f"restart.max_per_hour=0 allows no restart of {what}.")
        if len(times) >= limit:
            raise RestartLimitError(
                f"{what} was restarted {counted(len(times), 'time')} within an hour, as often as restart.max_per_hour={limit} allows."
            )
        # the exponent is bounded, since a float has no room for more
        wait_s = min(LONGEST_WAIT_S, self._settings.backoff_s * 2.0 ** min(len(times), 64))
        times.append(now)
        return Restart(len(times), limit, wait_s)
