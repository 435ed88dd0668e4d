"""The worker that generates trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import msgspec
import numpy as np

from rl_protocol import (
    BatchData,
    ConfigError,
    KeptSets,
    KVBatchMeta,
    ObjectColumn,
    RaggedColumn,
    RLError,
    Tag,
    pack_arrays,
    ragged,
)
from rl_protocol.batch.columns import offsets_from_lengths
from rl_protocol.batch.routed_experts import ExpertIds, check_experts, computed_tokens, fill_routed
from rl_protocol.bridge import Output, tqbridge
from rl_protocol.ports import DataPlane, ImageInput, Lease, RolloutEngine, SessionResult, settle
from rl_protocol.rl_columns import (
    IMAGE_COLUMNS,
    KEPT_COLUMNS,
    PROMPT_SCHEMA,
    ROUTED,
    ROUTED_COLUMNS,
    TEACHER_PROMPTS,
    TRAIN_PARTITION,
    prompt_partition,
)
from rl_trainer.asyncio_tasks import gather_or_cancel
from rl_trainer.data import PromptDataset, PromptRow
from rl_trainer.data.image_columns import ImageReader, image_columns
from rl_trainer.rollout.demonstrations import Demonstrations
from rl_trainer.rollout.session_turns import SINGLE_TURN, SessionKind, SessionRef, Tokenizer, Trajectory, run_sessions
from rl_trainer.rollout.teacher_context import TeacherContext
from rl_trainer.rollout.trajectory_stats import FULL
from rl_trainer.workers.base import Worker
from rl_trainer.workers.columns import NEWEST_VERSION, ROW_TAG, TASK_COLUMNS, TRAINER_SCHEMA, TRUNCATED, StepColumns
from rl_trainer.workers.messages import LeasedPrompt, Partition, RolloutCall, RolloutResult


class RolloutWorker(Worker):
    """Generates trajectories from its own copy of the data sets; the driver only names rows.

    Args:
        plane: where trajectories go.
        engine: generates responses.
        datasets: prompts by split.
        session: the kind of session.
        tokenizer: the policy's tokenizer, for sessions that read or write text.
        images: reads the images of prompts, for a policy that sees images.
        demonstrations: reads the data's answers, which are the last responses to training prompts;
            None: all responses are generated.
        observations: whether the tokens that environments answered are written.
        restart: whether sessions start again when an update of the weights aborts one of their
            requests; otherwise the new weights continue it.
        kept_sets: whether the tokens that top-p and top-k keep are written.
        experts: experts in each layer of the policy, where those of each token are written; 0: they
            are not.
        teacher: writes the prompts of the reference policy; None: it sees those of the policy.
    """

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"rollout": RolloutCall}

    def __init__(
        self,
        plane: DataPlane,
        engine: RolloutEngine,
        datasets: Mapping[str, PromptDataset],
        session: SessionKind = SINGLE_TURN,
        tokenizer: Tokenizer | None = None,
        images: ImageReader | None = None,
        *,
        demonstrations: Demonstrations | None = None,
        observations: bool = False,
        restart: bool = False,
        kept_sets: bool = False,
        experts: int = 0,
        teacher: TeacherContext | None = None,
    ) -> None:
        self.plane = plane
        self.columns = StepColumns(
            images=IMAGE_COLUMNS if images is not None else (),
            demonstration=() if demonstrations is None else ("demonstration",),
            observation=("observation",) if observations else (),
            kept=KEPT_COLUMNS if kept_sets else (),
            routed=ROUTED_COLUMNS if experts else (),
            teacher_prompts=() if teacher is None else (TEACHER_PROMPTS,),
        )
        self._experts = experts
        self._teacher = teacher
        self._demonstrations = demonstrations
        self._engine = engine
        self._datasets = datasets
        self._session = session
        self._tokenizer = tokenizer
        self._images = images
        self._restart = restart
        self._settling = set[asyncio.Task[RolloutResult]]()

    async def rollout(self, call: RolloutCall) -> RolloutResult:
        """Run the sessions, put the prompt rows, then settle the sessions.

        Tags carry step, weight version, lengths and rollout statistics. Cancelling the call ends
        its generation; after that its sessions are settled in any case.

        Raises:
            ConfigError: a row has images, and the policy sees none.
            RLError: the engine failed; no session is settled.
        """
        partition, prompts = call.partition, call.prompts
        rows = [self._datasets[partition.split][prompt.row] for prompt in prompts]
        images = [await self._read_images(row) for row in rows]
        refs = [
            SessionRef(prompt.lease.uid, session, row, seen)
            for prompt, row, seen in zip(prompts, rows, images, strict=True)
            for session in prompt.lease.sessions
        ]
        leases = [prompt.lease for prompt in prompts for _ in prompt.lease.sessions]
        given = [self._is_given(partition, lease, ref) for lease, ref in zip(leases, refs, strict=True)]
        run = await run_sessions(
            self._session,
            [ref for ref, is_given in zip(refs, given, strict=True) if not is_given],
            self._engine,
            partition.sampling,
            self._tokenizer,
            restart=self._restart,
        )
        generated = iter(run)
        ended = [
            self._given(partition, ref) if is_given else next(generated)
            for ref, is_given in zip(refs, given, strict=True)
        ]
        settling = asyncio.create_task(self._settle(partition, prompts, refs, ended))
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)
        return await asyncio.shield(settling)

    def _is_given(self, partition: Partition, lease: Lease, ref: SessionRef) -> bool:
        """Whether the data gives the response: the last ones of an attempt at a training prompt."""
        if self._demonstrations is None or partition.name != TRAIN_PARTITION:
            return False
        left = lease.sessions[-1] - ref.session
        return left < self._demonstrations.given(ref.row.data_source, partition.n)

    def _given(self, partition: Partition, ref: SessionRef) -> list[Trajectory]:
        assert self._demonstrations is not None
        version, longest = self._engine.weight_version, partition.sampling.max_new_tokens
        return [self._demonstrations.trajectory(ref.row, version, longest)]

    async def _settle(
        self,
        partition: Partition,
        prompts: Sequence[LeasedPrompt],
        refs: Sequence[SessionRef],
        ended: Sequence[Sequence[Trajectory] | RLError],
    ) -> RolloutResult:
        """Put the rows of prompts and of their trajectories, and settle the sessions.

        Both kinds of rows are put at once: a journal makes them durable in one commit.
        """
        first = {ref.uid: ref for ref in refs}
        puts: list[Coroutine[Any, Any, None]] = [
            self.write_prompts(
                KVBatchMeta(partition=prompt_partition(partition.name), keys=tuple(first)),
                [{ROW_TAG: prompt.row} for prompt in prompts],
                [ref.row for ref in first.values()],
                [ref.images for ref in first.values()],
            )
        ]
        leases = [prompt.lease for prompt in prompts for _ in prompt.lease.sessions]
        results = [
            SessionResult(lease, ref.session, error=str(end))
            if isinstance(end, RLError)
            else SessionResult(lease, ref.session, rows=len(end))
            for lease, ref, end in zip(leases, refs, ended, strict=True)
        ]
        named = [
            (lease, ref, trajectory)
            for lease, ref, end in zip(leases, refs, ended, strict=True)
            if not isinstance(end, RLError)
            for trajectory in end
        ]
        if named:
            keys = tuple(key for result in results for key in result.keys)
            meta = KVBatchMeta(partition=partition.name, keys=keys)
            puts.append(self.write_trajectories(meta, partition, named))
        await gather_or_cancel(*puts)
        await settle(self.plane, results)
        return RolloutResult(
            tokens=sum(len(t.response_ids) for *_, t in named),
            single=all(result.rows == 1 for result in results),
        )

    async def _read_images(self, row: PromptRow) -> tuple[ImageInput, ...]:
        """The images of a row, read and decoded in a thread, so that the event loop stays free."""
        if self._images is None:
            if row.images:
                raise ConfigError("A row has images, but RolloutWorker was created without `images`, which reads them.")
            return ()
        return await asyncio.to_thread(self._images, row.images, row.prompt_ids)

    @tqbridge(writes=lambda step: ("prompts", *step.teacher_prompts, *step.images, *TASK_COLUMNS), schema=PROMPT_SCHEMA)
    async def write_prompts(
        self, _: BatchData, tags: Sequence[Tag], rows: Sequence[PromptRow], images: Sequence[Sequence[ImageInput]]
    ) -> Output[None]:
        """Write what the trajectories of a prompt share, with the row in the data set as a tag."""
        pixels = await asyncio.to_thread(image_columns, images) if self._images else {}
        columns = BatchData(
            {
                "prompts": ragged([row.prompt_ids for row in rows], "int64"),
                "data_source": ObjectColumn.from_values(row.data_source for row in rows),
                "ground_truth": ObjectColumn.from_values(row.ground_truth for row in rows),
                "extra_info": ObjectColumn.from_values(_extra_info(row) for row in rows),
                **pixels,
            }
        )
        if self._teacher is not None:
            prompts = ragged([self._teacher.prompt(row) for row in rows], "int64")
            columns = columns.union(BatchData({TEACHER_PROMPTS: prompts}))
        return Output(columns=columns, tags=tags, result=None)

    @tqbridge(
        writes=lambda step: (
            "responses",
            "response_mask",
            "rollout_log_probs",
            "rollout_versions",
            *step.demonstration,
            *step.observation,
            *step.kept,
            *step.routed,
        ),
        schema=TRAINER_SCHEMA,
    )
    async def write_trajectories(
        self, _: BatchData, partition: Partition, named: Sequence[tuple[Lease, SessionRef, Trajectory]]
    ) -> Output[None]:
        """Write responses and what generated them, with their tags.

        Raises:
            BatchError: the experts of a trajectory are not those of its tokens.
        """
        data = BatchData(
            {
                "responses": ragged([t.response_ids for *_, t in named], "int64"),
                "response_mask": ragged([t.response_mask for *_, t in named], "bool"),
                "rollout_log_probs": ragged([t.log_probs for *_, t in named], "float32"),
                "rollout_versions": _version_column([trajectory for *_, trajectory in named]),
            }
        )
        if self.columns.demonstration:
            given = [[self._is_given(partition, lease, ref)] * len(t.response_ids) for lease, ref, t in named]
            data = data.union(BatchData({"demonstration": ragged(given, "bool")}))
        if self.columns.observation:
            data = data.union(BatchData({"observation": ragged([t.observations for *_, t in named], "bool")}))
        if self.columns.kept:
            data = data.union(_kept_columns([trajectory for *_, trajectory in named]))
        if self.columns.routed:
            data = data.union(_routed_columns(named, self._experts))
        tags: list[Tag] = [
            {
                **lease.tags,
                "step": partition.step,
                "version": t.weight_version,
                **({NEWEST_VERSION: t.newest_version} if t.newest_version > t.weight_version else {}),
                **({TRUNCATED: True} if t.truncated or (t.stats is not None and t.stats.finish == FULL) else {}),
                "prompt_len": len(ref.row.prompt_ids),
                "response_len": len(t.response_ids),
                **(t.stats.tags() if t.stats else {}),
            }
            for lease, ref, t in named
        ]
        return Output(columns=data, tags=tags, result=None)


def _version_column(trajectories: Sequence[Trajectory]) -> RaggedColumn:
    """Runs of (version, tokens) of these trajectories, [runs, 2] each."""
    runs = [one.runs for one in trajectories]
    values = np.array(list(chain.from_iterable(runs)), np.int32).reshape(-1, 2)
    return RaggedColumn(values, offsets_from_lengths([len(one) for one in runs]), "int32")


def _kept_columns(trajectories: Sequence[Trajectory]) -> BatchData:
    """KEPT_COLUMNS of these trajectories."""
    kept = [KeptSets.all_kept(len(one.response_ids)) if one.kept is None else one.kept for one in trajectories]
    columns = [one.counts for one in kept], [one.words for one in kept]
    return BatchData({name: ragged(rows, "int32") for name, rows in zip(KEPT_COLUMNS, columns, strict=True)})


def _routed_columns(named: Sequence[tuple[Lease, SessionRef, Trajectory]], experts: int) -> BatchData:
    """ROUTED_COLUMNS of these trajectories; those without experts have none of 0 layers."""
    rows = list[list[ExpertIds]]()
    for lease, ref, one in named:
        tokens = computed_tokens(len(ref.row.prompt_ids), len(one.response_ids))
        routed = fill_routed(one.routed, tokens)
        check_experts(routed, tokens, experts, f"Session {ref.session} of prompt {lease.uid!r}")
        rows.append([routed])
    return BatchData(pack_arrays(ROUTED, rows, ndim=3, dtype="int16"))


def _extra_info(row: PromptRow) -> dict[str, Any]:
    """The row's extra info, with the paths of its images as `images` unless that key is taken.

    Reward functions get paths, not pixels.
    """
    return {**({"images": list(row.images)} if row.images else {}), **row.extra_info}
