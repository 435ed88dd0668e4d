"""Sessions turn a prompt into trajectories.

`rl_trainer.rollout.session_kinds` has the kinds by name.

All sessions of a call run concurrently. Their requests are sent to the engine once every running
session waits for it, so what is generated depends neither on timing nor on order.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, cast

import msgspec
import numpy as np

from rl_protocol import ConfigError, KeptSets, RLError, RolloutError
from rl_protocol.batch.routed_experts import ExpertIds, join_routed
from rl_protocol.counted import counted
from rl_protocol.errors import user_code
from rl_protocol.ports import Generation, GenerationRequest, ImageInput, RolloutEngine, SamplingParams
from rl_trainer.data import PromptRow
from rl_trainer.rollout.partial_generation import generate_turn
from rl_trainer.rollout.stop_strings import tokens_until_stop
from rl_trainer.rollout.token_versions import VersionRuns, check_runs, joined_runs
from rl_trainer.rollout.trajectory_stats import RolloutStats


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One row to train on: the policy saw the prompt, then these tokens.

    A session that resets its context has one trajectory per context. What a later context starts
    with, beyond the prompt, are tokens that the policy did not generate.
    """

    response_ids: tuple[int, ...]
    """[R] tokens after the prompt."""
    response_mask: tuple[bool, ...]
    """[R] true where the policy generated the token."""
    log_probs: tuple[float, ...]
    """[R] log-probs of the rollout engine, nats; 0 where the policy did not generate the token."""
    weight_version: int
    """The oldest version of the weights that generated it."""
    versions: VersionRuns = ()
    """Runs of (version, tokens) of all tokens after the prompt, as `version_runs` gives them;
    empty: `weight_version` generated all.
    """
    observed: tuple[bool, ...] | None = None
    """[R] true where the environment of an agent wrote the token, for AlgorithmConfig.echo_coef;
    None: wherever the policy did not generate it.
    """
    stats: RolloutStats | None = None
    """Statistics for metrics; None: no statistics."""
    truncated: bool = False
    """The trajectory ended because rollout.response_length was reached."""
    kept: KeptSets | None = field(default=None, repr=False)
    """[R] the tokens from which each token was sampled, as `Generation.kept`; None: from all."""
    routed: ExpertIds | None = field(default=None, repr=False, compare=False)
    """[tokens, layers, K] the experts of the tokens of prompt and response that the model computed,
    joined from `Generation.routed` by `join_routed`; None: not recorded."""

    @classmethod
    def of(cls, *parts: Generation) -> Trajectory:
        """The trajectory of a session of one turn, which was generated in these parts."""
        ids = tuple(chain.from_iterable(part.response_ids for part in parts))
        runs = joined_runs((part.weight_version, len(part.response_ids)) for part in parts)
        return cls(
            response_ids=ids,
            response_mask=(True,) * len(ids),
            log_probs=tuple(chain.from_iterable(part.log_probs for part in parts)),
            weight_version=min((version for version, _ in runs), default=parts[-1].weight_version),
            versions=runs if len(runs) > 1 else (),
            truncated=parts[-1].finish_reason == "length",
            kept=KeptSets.joined((len(part.response_ids), part.kept) for part in parts),
            routed=join_routed(part.routed for part in parts),
        )

    @property
    def runs(self) -> VersionRuns:
        """Runs of (version, tokens) of all tokens after the prompt; empty: there are none."""
        one = ((self.weight_version, len(self.response_ids)),) if len(self.response_ids) else ()
        return self.versions or one

    @property
    def observations(self) -> tuple[bool, ...]:
        """[R] true where the environment wrote the token."""
        return tuple(not made for made in self.response_mask) if self.observed is None else self.observed

    @property
    def newest_version(self) -> int:
        """The newest version of the weights that generated it."""
        return max((version for version, _ in self.versions), default=self.weight_version)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Text to token ids and back, for sessions that read or write text."""

    encode: Callable[[str], Sequence[int]]
    """Adds no special tokens, and keeps those that the text names."""
    decode: Callable[[Sequence[int]], str]
    """Leaves out special tokens."""


class Generate(Protocol):
    """How a session calls the policy."""

    @property
    def response_length(self) -> int:
        """Most tokens of a trajectory after the prompt, including those the policy did not
        generate.
        """
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's tokenizer.

        Raises:
            ConfigError: the worker has none.
        """
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end each generation, see `SamplingParams.stop`."""
        ...

    def __call__(
        self, context: Sequence[int], max_tokens: int | None = None, *, stop: Sequence[str] = ()
    ) -> Awaitable[Generation]:
        """Generate one response.

        Args:
            context: [C] token ids before it.
            max_tokens: most tokens of it; None: rollout.response_length.
            stop: strings that end it, besides those of the property `stop`.

        Raises:
            ConfigError: a stop string is empty.
        """
        ...


def stop_check(generate: Generate, stop: Sequence[str] = ()) -> Callable[[Sequence[int]], int | None] | None:
    """What `generate_turn` needs to find stop strings in a turn of several parts; None: there are
    none.
    """
    stops = (*generate.stop, *stop)
    return (lambda ids: tokens_until_stop(ids, generate.tokenizer.decode, stops)) if stops else None


@dataclass(frozen=True)
class SessionKind:
    """A kind of session. `run` returns at least one trajectory, and the last one is scored."""

    run: Callable[[PromptRow, Generate], Awaitable[Sequence[Trajectory]]]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Descriptions of tools that the chat template writes into each prompt."""
    check: Callable[[PromptRow], None] | None = None
    """Raises ConfigError for a row that it can't run; None: it runs any."""


async def _single_turn(row: PromptRow, generate: Generate) -> Sequence[Trajectory]:
    budget = generate.response_length
    parts, finish = await generate_turn(
        lambda made, left: generate((*row.prompt_ids, *made), left), budget, stop_check(generate)
    )
    return [Trajectory.of(*parts[:-1], msgspec.structs.replace(parts[-1], finish_reason=finish))]


SINGLE_TURN = SessionKind(_single_turn)


@dataclass(frozen=True, slots=True)
class SessionRef:
    """One session to run."""

    uid: str
    session: int
    row: PromptRow
    images: tuple[ImageInput, ...] = ()
    """The images of the row, at the beginning of each context."""


async def run_sessions(
    kind: SessionKind,
    refs: Sequence[SessionRef],
    engine: RolloutEngine,
    sampling: SamplingParams,
    tokenizer: Tokenizer | None = None,
    *,
    restart: bool = False,
) -> list[list[Trajectory] | RLError]:
    """Run all sessions.

    With `restart`, a session starts again if the engine aborts one of its requests, as an update of
    the weights does. Otherwise it gets the tokens so far, and can continue.

    Returns:
        For each session its trajectories, or why it failed: it raised an exception, has no
        trajectory, or one whose columns do not align.

    Raises:
        ConfigError: a session needs the tokenizer, and there is none.
        RLError: the engine failed.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            batcher = _RequestBatcher(engine, sampling, tokenizer, len(refs), tasks, restart=restart)
            running = [tasks.create_task(batcher.run(kind, ref)) for ref in refs]
    except* RLError as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]


@dataclass(frozen=True, slots=True)
class _Wait:
    handle: _SessionHandle
    max_tokens: int
    stops: tuple[str, ...]
    request: GenerationRequest
    answer: asyncio.Future[Generation]


class _RequestBatcher:
    """Collects the requests of all sessions, and sends them once every session waits.

    A session may wait for several at once, which are sent together. It may cancel its request, for
    instance at a time limit of its own. The requests of the others are sent in tasks of the call,
    so they go on.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        running: int,
        tasks: asyncio.TaskGroup,
        *,
        restart: bool,
    ) -> None:
        self.sampling = sampling
        self.tokenizer = tokenizer
        self.restart = restart
        self._engine = engine
        self._running = running
        self._tasks = tasks
        self._waiting: list[_Wait] = []
        self._broken: RLError | None = None
        """How the engine failed."""

    async def run(self, kind: SessionKind, ref: SessionRef) -> list[Trajectory] | RLError:
        try:
            ended = await self._attempt(kind, ref)
            while ended is None:
                ended = await self._attempt(kind, ref)
        finally:
            self._running -= 1
        if self._broken is not None:  # this session caught the error, which ended the others
            raise self._broken
        self._serve_when_all_wait()
        return ended

    async def _attempt(self, kind: SessionKind, ref: SessionRef) -> list[Trajectory] | RLError | None:
        """Run a session; None: its result or error is dropped, and it must start again."""
        handle = _SessionHandle(self, ref)
        try:
            ended = await self._run(kind, ref, handle)
        except ConfigError:
            raise
        except RLError as error:
            ended = error
        finally:
            for wait in self._waiting:
                if wait.handle is handle:  # it ended without the answer
                    wait.answer.cancel()
        return None if handle.aborted and self._broken is None else ended

    async def _run(self, kind: SessionKind, ref: SessionRef, handle: _SessionHandle) -> list[Trajectory]:
        with user_code(lambda raised: RolloutError(f"Session {ref.session} of prompt {ref.uid!r} raised {raised}.")):
            returned: object = kind.run(ref.row, handle)
            if inspect.isawaitable(returned):
                returned = await returned
        trajectories = _trajectories(ref, returned)
        _check(ref, trajectories, self.sampling)
        return trajectories

    async def generate(
        self, handle: _SessionHandle, request: GenerationRequest, max_tokens: int, stops: tuple[str, ...]
    ) -> Generation:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Generation] = loop.create_future()
        self._waiting.append(_Wait(handle, max_tokens, stops, request, answer))
        loop.call_soon(self._serve_when_all_wait)  # after what the session requests at the same time
        return await answer

    def _serve_when_all_wait(self) -> None:
        self._waiting = [wait for wait in self._waiting if not wait.answer.done()]  # others were cancelled
        if not self._waiting or len({wait.handle for wait in self._waiting}) < self._running:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda wait: (wait.request.uid, wait.request.session)), []
        for limits in sorted({(wait.max_tokens, wait.stops) for wait in waiting}):
            served = [wait for wait in waiting if (wait.max_tokens, wait.stops) == limits]
            self._tasks.create_task(self._serve(*limits, served))

    async def _serve(self, budget: int, stops: tuple[str, ...], served: Sequence[_Wait]) -> None:
        sampling = msgspec.structs.replace(self.sampling, max_new_tokens=budget, stop=stops)
        try:
            with user_code(lambda raised: RolloutError(f"The rollout engine raised {raised}.")):
                generations = list(await self._engine.generate([wait.request for wait in served], sampling))
            if len(generations) != len(served):
                given = counted(len(generations), "generation")
                raise RolloutError(f"The rollout engine returned {given} for {counted(len(served), 'request')}.")
        except RLError as error:  # no session may wait for its response for ever
            self._fail(served, error)
            return
        for wait, generation in zip(served, generations, strict=True):
            if not wait.answer.done():
                wait.answer.set_result(generation)

    def _fail(self, served: Sequence[_Wait], error: RLError) -> None:
        """End the call with an error of the engine, which the sessions that wait raise."""
        self._broken = error
        for wait in served:
            if not wait.answer.done():
                wait.answer.set_exception(error)


def request_of_turn(
    uid: str, session: int, turn: int, context: Sequence[int], images: tuple[ImageInput, ...] = ()
) -> GenerationRequest:
    """The request of turn `turn` (from 0) of a session.

    Later turns get random streams of their own, since streams are drawn from (seed, uid, session).
    """
    name = f"{uid}/turn{turn}" if turn else uid
    return GenerationRequest(uid=name, session=session, prompt_ids=tuple(context), images=images)


class _SessionHandle:
    """`Generate` of one attempt at a session.

    Attributes:
        aborted: whether the session must start again, so that it gets no more responses.
    """

    def __init__(self, batcher: _RequestBatcher, ref: SessionRef) -> None:
        self.aborted = False
        self._batcher = batcher
        self._ref = ref
        self._turns = 0

    @property
    def response_length(self) -> int:
        return self._batcher.sampling.max_new_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        if self._batcher.tokenizer is None:
            raise ConfigError("This session reads and writes text: RolloutWorker must be given a tokenizer.")
        return self._batcher.tokenizer

    @property
    def stop(self) -> tuple[str, ...]:
        return self._batcher.sampling.stop

    async def __call__(
        self, context: Sequence[int], max_tokens: int | None = None, *, stop: Sequence[str] = ()
    ) -> Generation:
        ref, turn = self._ref, self._turns
        self._turns += 1
        request = request_of_turn(ref.uid, ref.session, turn, context, ref.images)
        if not self.aborted:
            stops = self.stop
            if stop:
                stops = msgspec.structs.replace(self._batcher.sampling, stop=(*stops, *stop)).stop  # checks them
            generation = await self._batcher.generate(self, request, max_tokens or self.response_length, stops)
            if self._batcher.sampling.routed_experts:
                _check_routed(generation, len(context), f"Session {ref.session} of prompt {ref.uid!r}")
            if not self._batcher.restart or generation.finish_reason != "abort":
                return generation
            self.aborted = True
        raise RolloutError(f"Session {ref.session} of prompt {ref.uid!r} starts again, since the weights have changed.")


def _trajectories(ref: SessionRef, returned: object) -> list[Trajectory]:
    """What the function of a session returned, which must be trajectories."""
    listed = list(cast("Iterable[object]", returned)) if isinstance(returned, Iterable) else [None]
    if not all(isinstance(one, Trajectory) for one in listed):
        raise RolloutError(
            f"Session {ref.session} of prompt {ref.uid!r} returned {returned!r:.200}; its function must return a list of Trajectory."
        )
    return cast("list[Trajectory]", listed)


def _check(ref: SessionRef, trajectories: Sequence[Trajectory], sampling: SamplingParams) -> None:
    where = f"Session {ref.session} of prompt {ref.uid!r}"
    if not trajectories:
        raise RolloutError(
            f"{where} has no trajectory; a session must return at least one, the last of which is scored."
        )
    for index, one in enumerate(trajectories):
        columns = (one.response_ids, one.response_mask, one.log_probs, one.observed)
        lengths = {len(column) for column in columns if column is not None}
        if len(lengths) > 1:
            raise RolloutError(
                f"{where}, trajectory {index}: response_ids, response_mask, log_probs and observed must align; got {lengths}."
            )
        if one.versions or one.weight_version < 0:
            check_runs(one.versions, len(one.response_ids), one.weight_version, f"{where}, trajectory {index}")
        if len(one.response_ids) > sampling.max_new_tokens:
            raise RolloutError(
                f"{where}, trajectory {index} has {len(one.response_ids)} tokens after the prompt, more than "
                f"SamplingParams.max_new_tokens={sampling.max_new_tokens}; raise that, or end the trajectory sooner."
            )
        if sampling.routed_experts and one.routed is None and any(one.response_mask):
            raise RolloutError(
                f"{where}, trajectory {index} has no routed experts; Trajectory.routed must join Generation.routed of its turns, or set "
                "AlgorithmConfig.router_replay=disabled."
            )
        if sampling.reports_kept_sets:
            _check_kept(one, f"{where}, trajectory {index}")


def _check_routed(one: Generation, context: int, where: str) -> None:
    """Check that a generation has the experts of the tokens that the model computed for it."""
    tokens, got = context + len(one.response_ids) - 1, 0 if one.routed is None else len(one.routed)
    if one.response_ids and got != tokens:
        raise RolloutError(
            f"{where} has a context of {context} tokens and a response of {len(one.response_ids)}, and the rollout engine reports the experts "
            f"of {got} tokens, not {tokens}. Set AlgorithmConfig.router_replay=disabled, or use an engine that reports them."
        )


def _check_kept(one: Trajectory, where: str) -> None:
    """Check that a trajectory says from which tokens each of its tokens was sampled."""
    if one.kept is None or len(one.kept) != len(one.response_ids):
        raise RolloutError(
            f"{where} has {len(one.response_ids)} tokens, and kept sets of {0 if one.kept is None else len(one.kept)}; with top_p or top_k "
            "Trajectory.kept must join Generation.kept of its turns, or set RolloutConfig.sampling_replay=false."
        )
    excluded = np.flatnonzero(~one.kept.contain(one.response_ids))
    if excluded.size:
        raise RolloutError(f"{where}: token {excluded[0]} after the prompt is not in the set that it was sampled from.")
