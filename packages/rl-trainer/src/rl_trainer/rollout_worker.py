"""The worker that generates."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from rl_protocol import BatchData, ConfigError, ObjectColumn, RowKey, Tag, ragged
from rl_protocol.ports import DataPlane, ImageInput, RolloutEngine
from rl_protocol.rl_columns import PROMPT_SCHEMA, prompt_partition
from rl_trainer.columns import TRAINER_SCHEMA
from rl_trainer.course import FULL
from rl_trainer.data import PromptDataset, PromptRow
from rl_trainer.messages import RolloutCall, RolloutResult
from rl_trainer.pixels import ImageReader, image_columns
from rl_trainer.sessions import SESSIONS, Codec, SessionRef, Trajectory, run_sessions
from rl_trainer.worker import Worker


class RolloutWorker(Worker):
    """Generates trajectories from prompts of its own copy of the data sets; the driver only names rows.

    Args:
        plane: where they go.
        engine: what generates.
        datasets: split -> prompts.
        session: name of the kind of session.
        codec: the policy's tokenizer, for sessions that read or write text.
        images: for a policy that sees images; what it makes of them becomes columns of the prompts' rows.
    """

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"rollout": RolloutCall}

    def __init__(
        self,
        plane: DataPlane,
        engine: RolloutEngine,
        datasets: Mapping[str, PromptDataset],
        session: str = "single_turn",
        codec: Codec | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self._plane = plane
        self._engine = engine
        self._datasets = datasets
        self._session = SESSIONS.get(session)
        self._codec = codec
        self._images = images

    async def rollout(self, call: RolloutCall) -> RolloutResult:
        """Run the sessions, then put the prompt rows and the trajectory rows; tags carry step, weight version, lengths and course.

        Raises:
            ConfigError: a row with images, and a policy that sees none.
        """
        rows = [self._datasets[call.split][ref.row] for ref in call.prompts]
        images = [await self._seen(row) for row in rows]
        refs = [
            SessionRef(ref.uid, session, row, seen)
            for ref, row, seen in zip(call.prompts, rows, images, strict=True)
            for session in range(call.n)
        ]
        sessions = await run_sessions(self._session, refs, self._engine, call.sampling, self._codec)
        pixels = await asyncio.to_thread(image_columns, images) if self._images else {}
        prompts = BatchData(
            {
                "prompts": ragged([row.prompt_ids for row in rows], "int64"),
                "data_source": ObjectColumn.from_values(row.data_source for row in rows),
                "ground_truth": ObjectColumn.from_values(row.ground_truth for row in rows),
                "extra_info": ObjectColumn.from_values(_extra_info(row) for row in rows),
                **pixels,
            }
        )
        PROMPT_SCHEMA.check(prompts)
        await self._plane.put(prompt_partition(call.partition), [ref.uid for ref in call.prompts], prompts)
        named = [
            (ref, index, trajectory)
            for ref, trajectories in zip(refs, sessions, strict=True)
            for index, trajectory in enumerate(trajectories)
        ]
        await self._put_trajectories(call, named)
        return RolloutResult(
            trajectories=len(named),
            tokens=sum(len(t.response_ids) for *_, t in named),
            truncated=sum(t.truncated or (t.course is not None and t.course.finish == FULL) for *_, t in named),
        )

    async def _seen(self, row: PromptRow) -> tuple[ImageInput, ...]:
        """The images of a row, read and decoded in a thread: the event loop keeps answering other calls."""
        if self._images is None:
            if row.images:
                raise ConfigError(
                    "A row has images, and RolloutWorker was made without `images`, which would read them."
                )
            return ()
        return await asyncio.to_thread(self._images, row.images, row.prompt_ids)

    async def _put_trajectories(self, call: RolloutCall, named: Sequence[tuple[SessionRef, int, Trajectory]]) -> None:
        data = BatchData(
            {
                "responses": ragged([t.response_ids for *_, t in named], "int64"),
                "response_mask": ragged([t.made for *_, t in named], "bool"),
                "rollout_log_probs": ragged([t.log_probs for *_, t in named], "float32"),
            }
        )
        TRAINER_SCHEMA.check(data)
        tags: list[Tag] = [
            {
                "step": call.step,
                "version": t.weight_version,
                "prompt_len": len(ref.row.prompt_ids),
                "response_len": len(t.response_ids),
                **(t.course.tags() if t.course else {}),
            }
            for ref, _, t in named
        ]
        keys = [RowKey(ref.uid, ref.session, index).text for ref, index, _ in named]
        await self._plane.put(call.partition, keys, data, tags=tags)


def _extra_info(row: PromptRow) -> dict[str, Any]:
    """With the paths of its images as `images`, unless the row has something of that name: reward functions see references, no pixels."""
    return {**({"images": list(row.images)} if row.images else {}), **row.extra_info}
