"""ReplicaSet: the replicas in use and those in quarantine, by name."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from rl_ckpt_engine.endpoints.receiver import ReceiverHandle
from rl_ckpt_engine.sync.peer_calls import call_all, format_failures
from rl_protocol.errors import ConfigError, WeightSyncError

_log = logging.getLogger(__name__)
T = TypeVar("T")


class ReplicaSet:
    """Handles of the replicas in use, and the reasons why others are in quarantine.

    Args:
        receivers: handles with unique names.
        timeout_s: deadline of a call in seconds.

    Attributes:
        rejoined: number of replicas that returned from quarantine.

    Raises:
        ConfigError: two receivers have the same name.
    """

    def __init__(self, receivers: Iterable[ReceiverHandle], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._in_use: dict[str, ReceiverHandle] = {}
        self._quarantined: dict[str, str] = {}
        self.rejoined = 0
        for handle in receivers:
            self.check_new(handle.name)
            self._in_use[handle.name] = handle

    @property
    def in_use(self) -> Mapping[str, ReceiverHandle]:
        """Name -> handle."""
        return MappingProxyType(self._in_use)

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Name -> reason."""
        return MappingProxyType(self._quarantined)

    def check_new(self, name: str) -> None:
        """Check that no replica in use has that name.

        Raises:
            ConfigError: one has.
        """
        if name in self._in_use:
            raise ConfigError(f"Two receivers have the name {name!r}; names must be unique.")

    def check_known(self, name: str) -> None:
        """Check that there is a replica of that name, in use or in quarantine.

        Raises:
            ConfigError: there is none.
        """
        known = {*self._in_use, *self._quarantined}
        if name not in known:
            raise ConfigError(f"There is no receiver {name!r}; there are {sorted(known)}.")

    def add(self, handle: ReceiverHandle) -> None:
        """Take a new replica into use, or one from quarantine."""
        self.rejoined += self._quarantined.pop(handle.name, None) is not None
        self._in_use[handle.name] = handle

    def quarantine(self, reasons: Mapping[str, str]) -> None:
        """Quarantine replicas in use; names that are not in use are ignored."""
        for name, reason in reasons.items():
            if self._in_use.pop(name, None) is not None:  # it may have been removed meanwhile
                self._quarantined[name] = reason
                _log.warning("Receiver %s is quarantined: %s.", name, reason)

    def remove(self, name: str) -> None:
        """Remove a replica, in use or in quarantine; see `check_known`."""
        self.check_known(name)
        self._in_use.pop(name, None)
        self._quarantined.pop(name, None)

    async def call(self, what: str, call: Callable[[ReceiverHandle], Awaitable[T]]) -> list[T]:
        """Call every replica in use, and quarantine those that fail; returns the others' answers.

        Raises:
            WeightSyncError: the call failed on all replicas; then none is quarantined.
        """
        outcome = await call_all(what, self._in_use, self._timeout_s, call)
        if outcome.failed and not outcome.done:
            raise WeightSyncError(
                f"The call {what!r} failed on every replica.{format_failures(outcome.failed.values())}"
            )
        self.quarantine(outcome.failed)
        return list(outcome.done.values())
