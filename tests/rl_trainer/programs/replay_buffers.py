"""Replay buffers of a trainer, and leases without a buffer, for tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict

from rl_protocol.ports import DataPlane, Lease
from rl_trainer.config import ReplayConfig
from rl_trainer.workers.columns import PARTITIONS
from rl_trainer.workers.messages import LeasedPrompt
from rl_transferqueue.consume import prompt_groups
from rl_transferqueue.consume.replay_buffer import ReplayBuffer


def make_buffers(
    plane: DataPlane, replay: ReplayConfig | None = None, max_staleness: int = 0
) -> dict[str, ReplayBuffer]:
    """A buffer for each partition of the trainer, to be opened."""
    settings = asdict(replay or ReplayConfig())
    config = prompt_groups.ReplayConfig(
        groups_per_version=1, when_stale="drop", max_staleness=max_staleness, **settings
    )
    return {name: ReplayBuffer(plane, name, config) for name in PARTITIONS}


@asynccontextmanager
async def opened(buffers: Mapping[str, ReplayBuffer]) -> AsyncGenerator[None]:
    """Open the buffers until the end of the context."""
    async with AsyncExitStack() as stack:
        for buffer in buffers.values():
            await stack.enter_async_context(buffer)
        yield


def leased(prompts: Mapping[str, int] | Iterable[tuple[str, int]], n: int = 1) -> tuple[LeasedPrompt, ...]:
    """Leases of `n` sessions for prompts: (uid, row in the data set)."""
    pairs = prompts.items() if isinstance(prompts, Mapping) else prompts
    return tuple(LeasedPrompt(Lease("train", uid, 0, tuple(range(n)), 0, 600.0), row) for uid, row in pairs)
