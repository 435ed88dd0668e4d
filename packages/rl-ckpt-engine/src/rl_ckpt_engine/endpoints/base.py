"""Base class of the endpoints that have an engine: sender and receiver."""

from __future__ import annotations

from rl_ckpt_engine.endpoints.operations import Endpoint, operation
from rl_ckpt_engine.engines.contract import CheckpointEngine, check_capabilities
from rl_protocol.errors import WeightSyncError


class EngineEndpoint(Endpoint):
    """An endpoint with an engine, which it alone uses."""

    def __init__(self, engine: CheckpointEngine) -> None:
        check_capabilities(type(engine))
        self._opened = engine
        self._closed = False

    @property
    def _engine(self) -> CheckpointEngine:
        """The engine.

        Raises:
            WeightSyncError: the endpoint is closed: its engine would take memory again.
        """
        if self._closed:
            raise WeightSyncError(f"This {type(self).__name__} is closed; make another one.")
        return self._opened

    def close(self) -> None:
        """Close the engine; safe to call twice."""
        self._closed = True
        self._opened.close()

    @operation
    async def prepare(self) -> bytes:
        """Metadata of this member of a process group; see CheckpointEngine.prepare."""
        return self._engine.prepare()

    @operation
    async def join(self, member: bytes, timeout_s: float) -> None:
        """Join a process group with this part of its topology, while all other members join.

        Raises:
            WeightSyncError: the engine forms no group, or a member did not join.
        """
        self._engine.init_process_group(member)
        await self._engine.join(timeout_s=timeout_s)
