"""Sessions: how a prompt becomes trajectories. One turn is the usual way; a package may install others (tools, several agents, context resets).

All sessions of a call run side by side. When every one that still runs waits for the engine, their requests are served together, so what is
generated depends on neither timing nor order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from rl_protocol import RLError, RolloutError
from rl_protocol.ports import Generation, GenerationRequest, RolloutEngine, SamplingParams
from rl_trainer.algorithms.registry import Registry
from rl_trainer.data import PromptRow


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One row to train on. The policy saw the prompt, then these tokens.

    A context that was reset is a trajectory of its own: what it starts with, beyond the prompt, are tokens that the policy did not make.
    """

    response_ids: tuple[int, ...]
    """[R] tokens after the prompt."""
    made: tuple[bool, ...]
    """[R] true where the policy made the token."""
    log_probs: tuple[float, ...]
    """[R] of the rollout engine, nats; 0 where the policy did not make the token."""
    weight_version: int
    """The oldest of the weights that made it."""

    @classmethod
    def of(cls, generation: Generation) -> Trajectory:
        """All of it made in one turn."""
        return cls(
            response_ids=generation.response_ids,
            made=(True,) * len(generation.response_ids),
            log_probs=generation.log_probs,
            weight_version=generation.weight_version,
        )


class Generate(Protocol):
    """What a session asks the policy with."""

    def __call__(self, context: Sequence[int], max_tokens: int | None = None) -> Awaitable[Generation]:
        """What the policy goes on with after these token ids: at most `max_tokens` tokens, by default rollout.response_length."""
        ...


@dataclass(frozen=True)
class SessionKind:
    """A way to run sessions; `run` returns at least one trajectory, and the last one is scored."""

    run: Callable[[PromptRow, Generate], Awaitable[Sequence[Trajectory]]]


async def _single_turn(row: PromptRow, generate: Generate) -> Sequence[Trajectory]:
    return [Trajectory.of(await generate(row.prompt_ids))]


SESSIONS = Registry(
    "rollout.session", "rl_trainer.sessions", SessionKind, {"single_turn": SessionKind(_single_turn)}, {}
)


@dataclass(frozen=True, slots=True)
class SessionRef:
    """One session to run."""

    uid: str
    session: int
    row: PromptRow


async def run_sessions(
    kind: SessionKind, refs: Sequence[SessionRef], engine: RolloutEngine, sampling: SamplingParams
) -> list[list[Trajectory]]:
    """Trajectories of each session, in order.

    Raises:
        RolloutError: a session without trajectories, or one that does not align; names it.
        RLError: what the engine or a session raised; the first ends all.
    """
    table = _Table(engine, sampling, len(refs))
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(table.play(kind, ref)) for ref in refs]
    except* RLError as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]


@dataclass(frozen=True, slots=True)
class _Wait:
    max_tokens: int
    request: GenerationRequest
    answer: asyncio.Future[Generation]


class _Table:
    """Where sessions wait for the engine."""

    def __init__(self, engine: RolloutEngine, sampling: SamplingParams, running: int) -> None:
        self._engine = engine
        self._sampling = sampling
        self._running = running
        self._waiting: list[_Wait] = []

    async def play(self, kind: SessionKind, ref: SessionRef) -> list[Trajectory]:
        turns = 0

        async def generate(context: Sequence[int], max_tokens: int | None = None) -> Generation:
            nonlocal turns
            # the random stream of a turn is drawn from (seed, uid, session); later turns have streams of their own
            uid = ref.uid if turns == 0 else f"{ref.uid}/turn{turns}"
            turns += 1
            answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
            request = GenerationRequest(uid=uid, session=ref.session, prompt_ids=tuple(context))
            self._waiting.append(_Wait(max_tokens or self._sampling.max_new_tokens, request, answer))
            await self._serve_when_all_wait()
            return await answer

        try:
            trajectories = list(await kind.run(ref.row, generate))
        finally:
            self._running -= 1
        _check(ref, trajectories, self._sampling)
        await self._serve_when_all_wait()
        return trajectories

    async def _serve_when_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < self._running:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda wait: (wait.request.uid, wait.request.session)), []
        for budget in sorted({wait.max_tokens for wait in waiting}):
            served = [wait for wait in waiting if wait.max_tokens == budget]
            sampling = msgspec.structs.replace(self._sampling, max_new_tokens=budget)
            generations = await self._engine.generate([wait.request for wait in served], sampling)
            for wait, generation in zip(served, generations, strict=True):
                wait.answer.set_result(generation)


def _check(ref: SessionRef, trajectories: Sequence[Trajectory], sampling: SamplingParams) -> None:
    where = f"Session {ref.session} of prompt {ref.uid!r}"
    if not trajectories:
        raise RolloutError(
            f"{where} has no trajectory; a session must return at least one, the last of which is scored."
        )
    for index, one in enumerate(trajectories):
        lengths = {len(one.response_ids), len(one.made), len(one.log_probs)}
        if len(lengths) > 1:
            raise RolloutError(
                f"{where}, trajectory {index}: response_ids, made and log_probs must align; got {lengths}."
            )
        if len(one.response_ids) > sampling.max_new_tokens:
            raise RolloutError(
                f"{where}, trajectory {index} has {len(one.response_ids)} tokens after the prompt, more than "
                f"rollout.response_length={sampling.max_new_tokens}; raise that, or end the trajectory sooner."
            )
