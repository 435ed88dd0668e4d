"""Start a run again from its newest checkpoint when a process has died or ranks were cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rl_app_ppo.driver.restart_policy import Restart, RestartLimitError, RestartPolicy
from rl_app_ppo.worker.rank_connections import RankConnectionError
from rl_protocol import ConfigError, OutputError, WorkerDiedError

T = TypeVar("T")
Attempt = Callable[["Death | None"], T]
"""Trains until the end of the run; with a Death, from the newest checkpoint."""


class Death:
    """A process has died, or ranks have lost their connection, and the run starts again.

    Attributes:
        restart: the restart that the policy allows.
        note: what happened, and what follows, for the user.
    """

    def __init__(self, error: WorkerDiedError | RankConnectionError, restart: Restart) -> None:
        self.restart = restart
        died = isinstance(error, WorkerDiedError)
        what = "a process of the run has died" if died else "ranks of a model have lost their connection"
        self.note = f"{what}, so the run starts again ({restart}): {error.message}"


def with_restarts(attempt: Attempt[T], policy: RestartPolicy, say: Callable[[str], None]) -> T:
    """Make attempts at a run until one does not end with the death of a process or of a connection
    between ranks.

    Any other error would occur again: it ends the run.

    Args:
        attempt: starts all processes and ends them, whether it returns or fails.
        policy: counts and delays the restarts.
        say: prints a line.

    Raises:
        RestartLimitError: the run was started again as often as the policy allows, a rollout worker
            was, or an attempt after a death is refused, as when too few hosts are left, or can't
            write its files.
        RLError: of an attempt.
    """
    death: Death | None = None
    while True:
        try:
            return attempt(death)
        except RestartLimitError:
            raise
        except (WorkerDiedError, RankConnectionError) as error:
            death = Death(error, _next(policy, error))
            say(death.note)
        except (ConfigError, OutputError) as error:
            if death is None:
                raise
            raise RestartLimitError(f"{error.message} The run was started again before: {death.note}") from error


def _next(policy: RestartPolicy, error: WorkerDiedError | RankConnectionError) -> Restart:
    try:
        return policy.next("the run")
    except RestartLimitError as limit:
        raise RestartLimitError(f"{error.message} It is not started again: {limit.message}") from error
