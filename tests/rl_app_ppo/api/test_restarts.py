"""Attempts at a run after the death of a process, and errors that would occur again."""

from __future__ import annotations

import pytest

from rl_app_ppo.api.restarts import with_restarts
from rl_app_ppo.config.restart import RestartConfig
from rl_app_ppo.driver.restart_policy import RestartLimitError, RestartPolicy
from rl_app_ppo.worker.rank_connections import RankConnectionError
from rl_protocol import ConfigError, HangError, OutputError, RewardError, WorkerDiedError, WorkerError

DIED = WorkerDiedError("Worker actor died during update_actor: it was killed.")


def outcome(*errors, max_per_hour=2):
    """What attempts that end with these errors, and then well, return; and what is said."""
    policy, said, left = RestartPolicy(RestartConfig(max_per_hour=max_per_hour, backoff_s=0.5)), [], list(errors)

    def attempt(death):
        if left:
            raise left.pop(0)
        return death

    try:
        return with_restarts(attempt, policy, said.append), said
    except Exception as error:
        return error, said


def test_a_run_without_a_death_has_one_attempt():
    assert outcome() == (None, [])


def test_each_death_is_named_and_delays_the_next_attempt():
    death, said = outcome(DIED, DIED)
    assert death.restart.wait_s == 1.0
    assert said == [
        f"a process of the run has died, so the run starts again (restart {i} of at most 2 an hour, in {wait} s): "
        "Worker actor died during update_actor: it was killed."
        for i, wait in ((1, "0.5"), (2, "1"))
    ]


def test_ranks_that_lost_their_connection_are_started_again():
    cut = RankConnectionError("Worker actor-1 on node7 has lost its connection.")
    death, said = outcome(cut)
    assert death.restart.number == 1
    assert said == [
        "ranks of a model have lost their connection, so the run starts again (restart 1 of at most 2 an hour, in 0.5 s): "
        "Worker actor-1 on node7 has lost its connection."
    ]
    error, _ = outcome(cut, max_per_hour=0)
    assert isinstance(error, RestartLimitError)
    assert str(error).startswith("Worker actor-1 on node7 has lost its connection. It is not started again: ")


def test_beyond_the_limit_the_death_is_the_error_and_names_the_key():
    error, said = outcome(DIED, DIED, DIED)
    assert isinstance(error, RestartLimitError)
    assert str(error) == (
        "Worker actor died during update_actor: it was killed. It is not started again: the run was restarted 2 times within an hour, "
        "as often as restart.max_per_hour=2 allows."
    )
    assert len(said) == 2
    assert isinstance(outcome(DIED, max_per_hour=0)[0], RestartLimitError)


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("Worker actor failed in update_actor: ValueError: bad row."),
        RewardError("row 3 has no truth"),
        ConfigError("actor.optim.lr must be positive"),
        HangError("Nothing has moved for 900 s"),
        RestartLimitError("Rollout worker rollout-0 is lost and gets no new process."),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_would_happen_again_ends_the_run(error):
    def attempt(death):
        raise error

    with pytest.raises(type(error)) as caught:
        with_restarts(attempt, RestartPolicy(RestartConfig()), [].append)
    assert caught.value is error


@pytest.mark.parametrize(
    "why",
    [
        ConfigError("trainer.nnodes=2 needs 2 hosts; the cluster has 1."),
        OutputError("What the run puts out can't be written to metrics.jsonl: No space left on device."),
    ],
)
def test_a_run_that_was_started_again_fails_and_is_not_refused(why):
    """The exit code is that of a failed run: the configuration was right when it began.

    The disk may be full long after the run has started again.
    """
    error, _ = outcome(DIED, why)
    assert isinstance(error, RestartLimitError)
    assert not isinstance(error, ConfigError | OutputError)
    assert str(error) == (
        f"{why} The run was started again before: a process of the run has died, so the run starts again (restart 1 of at most 2 an hour, "
        "in 0.5 s): Worker actor died during update_actor: it was killed."
    )
