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

from rl_protocol import ConfigError, RLError, RolloutError
from rl_protocol.ports import Generation, GenerationRequest, ImageInput, RolloutEngine, SamplingParams
from rl_trainer.algorithms.registry import Registry
from rl_trainer.course import Course
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
    course: Course | None = None
    """How it came about, for metrics; None: nothing to tell."""
    truncated: bool = False
    """It ended because rollout.response_length was reached."""

    @classmethod
    def of(cls, generation: Generation) -> Trajectory:
        """All of it made in one turn."""
        return cls(
            response_ids=generation.response_ids,
            made=(True,) * len(generation.response_ids),
            log_probs=generation.log_probs,
            weight_version=generation.weight_version,
            truncated=generation.finish_reason == "length",
        )


@dataclass(frozen=True, slots=True)
class Codec:
    """Between text and token ids; what a session needs that reads what the policy wrote, or tells it something."""

    encode: Callable[[str], Sequence[int]]
    """No special tokens are added; those that the text names are kept."""
    decode: Callable[[Sequence[int]], str]
    """Without special tokens."""


class Generate(Protocol):
    """What a session asks the policy with."""

    @property
    def response_length(self) -> int:
        """Most tokens of a trajectory after the prompt, those the policy did not make included."""
        ...

    @property
    def codec(self) -> Codec:
        """The policy's tokenizer.

        Raises:
            ConfigError: the worker was made without one.
        """
        ...

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
    images: tuple[ImageInput, ...] = ()
    """Of the row, as the policy is shown them; each of its turns begins with them."""


async def run_sessions(
    kind: SessionKind,
    refs: Sequence[SessionRef],
    engine: RolloutEngine,
    sampling: SamplingParams,
    codec: Codec | None = None,
) -> list[list[Trajectory]]:
    """Trajectories of each session, in order.

    Raises:
        ConfigError: a session asks for the tokenizer, and there is none.
        RolloutError: a session without trajectories, or one that does not align; names it.
        RLError: what the engine or a session raised; the first ends all.
    """
    table = _Table(engine, sampling, codec, len(refs))
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

    def __init__(self, engine: RolloutEngine, sampling: SamplingParams, codec: Codec | None, running: int) -> None:
        self.sampling = sampling
        self.codec = codec
        self._engine = engine
        self._running = running
        self._waiting: list[_Wait] = []

    async def play(self, kind: SessionKind, ref: SessionRef) -> list[Trajectory]:
        try:
            trajectories = list(await kind.run(ref.row, _Seat(self, ref)))
        finally:
            self._running -= 1
        _check(ref, trajectories, self.sampling)
        await self._serve_when_all_wait()
        return trajectories

    async def ask(self, request: GenerationRequest, max_tokens: int) -> Generation:
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Wait(max_tokens, request, answer))
        await self._serve_when_all_wait()
        return await answer

    async def _serve_when_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < self._running:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda wait: (wait.request.uid, wait.request.session)), []
        for budget in sorted({wait.max_tokens for wait in waiting}):
            served = [wait for wait in waiting if wait.max_tokens == budget]
            sampling = msgspec.structs.replace(self.sampling, max_new_tokens=budget)
            generations = await self._engine.generate([wait.request for wait in served], sampling)
            for wait, generation in zip(served, generations, strict=True):
                wait.answer.set_result(generation)


def request_of_turn(
    uid: str, session: int, turn: int, context: Sequence[int], images: tuple[ImageInput, ...] = ()
) -> GenerationRequest:
    """What turn number `turn`, from 0, of a session asks. The random stream of a turn is drawn from (seed, uid, session): later ones have
    streams of their own."""
    name = f"{uid}/turn{turn}" if turn else uid
    return GenerationRequest(uid=name, session=session, prompt_ids=tuple(context), images=images)


class _Seat:
    """`Generate` of one session."""

    def __init__(self, table: _Table, ref: SessionRef) -> None:
        self._table = table
        self._ref = ref
        self._turns = 0

    @property
    def response_length(self) -> int:
        return self._table.sampling.max_new_tokens

    @property
    def codec(self) -> Codec:
        if self._table.codec is None:
            raise ConfigError("This session reads and writes text: RolloutWorker must be given a codec.")
        return self._table.codec

    async def __call__(self, context: Sequence[int], max_tokens: int | None = None) -> Generation:
        ref, turn = self._ref, self._turns
        self._turns += 1
        request = request_of_turn(ref.uid, ref.session, turn, context, ref.images)
        return await self._table.ask(request, max_tokens or self.response_length)


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
