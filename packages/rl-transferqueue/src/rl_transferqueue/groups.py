"""The life of prompt groups between the data set and the trainer. Pure: no plane, no clock; times are the caller's.

    add -> pending -> running -> finished -> taken -> (committed, forgotten)
              ^          |           |
              +--refill--+--too old--+        failed: nothing more is tried; `take` raises until it is discarded

A group is one prompt with `size` sessions (rollouts). It is leased as a whole, concluded when every session has settled or its lease has ended,
and taken as a whole. Each lease is a new *attempt* with session numbers of its own, so that what an earlier attempt still writes can neither
be mistaken for the present one nor overwrite it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from rl_protocol.errors import BatchError, ConfigError, RolloutError

Status = Literal["pending", "running", "finished", "failed", "taken"]
STATUSES: tuple[Status, ...] = ("pending", "running", "finished", "failed", "taken")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """What a replay buffer does with what is late, old or broken.

    Raises:
        ConfigError: a value out of range; names it.
    """

    groups_per_version: int
    """Groups the trainer takes for each policy version."""
    max_staleness: int = 0
    """Most policy versions between the one that a group was started with and the one that is trained on it."""
    when_stale: Literal["drop", "wait"] = "wait"
    """wait: nothing is started, and nobody is overtaken, such that a group would be too old at its turn: producers wait, then the trainer.
    drop: nobody waits; a group that is too old at its turn is refilled."""
    on_failure: Literal["fail", "refill", "accept_partial"] = "refill"
    """A group with failed or unsettled sessions at its conclusion. fail: it is failed. refill: its prompt is tried again from the start.
    accept_partial: it is finished with the good sessions if there are at least `min_sessions`, else tried again."""
    min_sessions: int = 1
    """For accept_partial."""
    max_attempts: int = 3
    """How often a prompt is tried, whatever the reason, before it is failed."""
    lease_s: float = 600.0
    """Seconds from the start of a group to the end of its lease."""

    def __post_init__(self) -> None:
        for name, low in (("groups_per_version", 1), ("max_staleness", 0), ("min_sessions", 1), ("max_attempts", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"replay.{name} must be at least {low}; got {getattr(self, name)}.")
        if not 0 < self.lease_s < float("inf"):
            raise ConfigError(f"replay.lease_s must be a positive number of seconds; got {self.lease_s}.")


class Lease(msgspec.Struct, frozen=True):
    """The right and duty of one worker to settle each session of one group."""

    partition: str
    uid: str
    attempt: int
    sessions: tuple[int, ...]
    """Session numbers, never used before for this prompt."""
    version: int
    """Policy version it is generated with."""
    seconds: float
    """How long the lease lasts from its start."""


@dataclass(slots=True, kw_only=True)
class Group:
    """What is known of one prompt; changed by `GroupBook` alone."""

    uid: str
    size: int
    order: int
    """Smaller: added earlier."""
    status: Status = "pending"
    attempt: int = 0
    version: int = 0
    """Policy version of the present attempt."""
    reason: str = ""
    """Why the last attempt came to nothing."""
    lease_until: float = 0.0
    settled: dict[int, int] = field(default_factory=dict[int, int])
    """Session -> rows it wrote; 0: it failed. Of the present attempt."""

    @property
    def sessions(self) -> tuple[int, ...]:
        """Session numbers of the present attempt."""
        return tuple(range(self.attempt * self.size, (self.attempt + 1) * self.size))

    @property
    def good(self) -> list[int]:
        """Sessions that have rows, ascending."""
        return sorted(session for session, rows in self.settled.items() if rows)


class GroupBook:
    """All groups of one buffer.

    Every operation checks its arguments before it changes anything. What others must do afterwards is collected in `changed` (uids whose
    state is to be written down) and `abandoned` ((uid, attempt) whose rows are to be cleared first); whoever does it empties them.
    """

    def __init__(self, config: ReplayConfig, partition: str = "") -> None:
        self.config = config
        self.partition = partition
        self.groups: dict[str, Group] = {}
        self.changed: set[str] = set()
        self.abandoned: list[tuple[str, int]] = []
        self._order = 0
        self._version = 0
        self._taken = 0

    # -- growing
    def add(self, uid: str, size: int) -> None:
        """A new prompt, pending.

        Raises:
            BatchError: a uid that is there already, or a size below 1.
        """
        if uid in self.groups or size < 1:
            raise BatchError(
                f"Group {uid!r} of {size} sessions can't be added: it is there already, or has no session."
            )
        self.restore(Group(uid=uid, size=size, order=self._order))
        self.changed.add(uid)

    def restore(self, group: Group) -> None:
        """A group as it was written down; what was taken and never committed is finished again."""
        group.status = "finished" if group.status == "taken" else group.status
        self.groups[group.uid] = group
        self._order = max(self._order, group.order + 1)

    # -- producing
    def start(self, count: int, version: int, now: float) -> list[Lease]:
        """Up to `count` pending groups, oldest first, set running with policy version `version`."""
        self._version, self._taken = max((self._version, self._taken), (version, 0))
        leases: list[Lease] = []
        for group in sorted(self._with("pending"), key=lambda g: g.order)[: max(count, 0)]:
            before = group.version
            group.version = version
            if self.config.when_stale == "wait" and not self._in_time([*self._open(), group], self._taken):
                group.version = before
                break
            group.status, group.lease_until = "running", now + self.config.lease_s
            group.settled = {}
            self.changed.add(group.uid)
            leases.append(Lease(self.partition, group.uid, group.attempt, group.sessions, version, self.config.lease_s))
        return leases

    def settle(self, uid: str, attempt: int, session: int, rows: int, reason: str = "") -> bool:
        """A session has ended with `rows` rows, or has failed (0 rows). Said twice, it counts once.

        Returns:
            Whether it belongs to the group; False: it came too late, and its rows are to be cleared.
        """
        group = self.groups.get(uid)
        if group is None or group.attempt != attempt or group.status == "pending":
            return False
        if session in group.settled:
            return True
        if group.status != "running" or session not in group.sessions:
            return False
        group.settled[session] = rows
        group.reason = group.reason if rows else f"session {session}: {reason}"
        if len(group.settled) == group.size:
            self._conclude(group)
        return True

    def expire(self, now: float) -> None:
        """Conclude the groups whose lease has ended."""
        for group in [g for g in self._with("running") if g.lease_until <= now]:
            missing = sorted(set(group.sessions) - set(group.settled))
            group.reason = f"the lease of {self.config.lease_s:g} s ended before sessions {missing} settled"
            self._conclude(group)

    def next_expiry(self) -> float | None:
        """When the next lease ends."""
        return min((group.lease_until for group in self._with("running")), default=None)

    # -- consuming
    def take(self, count: int, version: int) -> list[Group] | None:
        """The `count` oldest finished groups, to be trained on by policy `version`; None: not yet.

        Raises:
            RolloutError: a group has failed; it is never passed over in silence.
            BatchError: a version older than one that was seen.
        """
        if version < self._version or count < 1:
            raise BatchError(
                f"A batch has at least 1 group and versions only grow; got {count}, {version} after {self._version}."
            )
        if failed := self._with("failed"):
            raise RolloutError(
                f"{len(failed)} groups have failed, the first is {failed[0].uid!r} after {failed[0].attempt + 1} attempts: "
                f"{failed[0].reason}. Discard them, or set replay.on_failure or replay.max_attempts."
            )
        self._version, self._taken = max((self._version, self._taken), (version, 0))
        for group in self._with("finished"):
            if version - group.version > self.config.max_staleness:
                self._retry(group, f"of policy version {group.version}, too old for version {version}")
        ready = [group for group in self._open() if group.status == "finished"][:count]
        if len(ready) < count:
            return None
        chosen = {group.uid for group in ready}
        left = [group for group in self._open() if group.uid not in chosen]
        overtaken = any(group.status == "running" and _turn(group) < _turn(ready[-1]) for group in left)
        if self.config.when_stale == "wait" and overtaken and not self._in_time(left, self._taken + count):
            return None
        self._taken += count
        for group in ready:
            group.status = "taken"
        self.changed |= chosen
        return ready

    def forget(self, uids: Sequence[str], status: Literal["taken", "failed"]) -> None:
        """Groups that are done with.

        Raises:
            BatchError: one that is not there, or not in that status; nothing is forgotten.
        """
        for uid in uids:
            if uid not in self.groups or self.groups[uid].status != status:
                there = self.groups[uid].status if uid in self.groups else "not there"
                raise BatchError(f"Group {uid!r} is {there}, not {status}.")
        for uid in uids:
            self.groups.pop(uid, None)
            self.changed.discard(uid)

    def undo(self, uids: Sequence[str]) -> None:
        """Groups just started or taken that nobody got after all."""
        for uid in uids:
            group = self.groups[uid]
            if group.status == "taken":
                self._taken -= 1
            group.status = "finished" if group.status == "taken" else "pending"
            self.changed.add(uid)

    def counts(self) -> dict[Status, int]:
        """How many groups there are in each status."""
        seen = Counter(group.status for group in self.groups.values())
        return {status: seen[status] for status in STATUSES}

    # -- inner
    def _with(self, status: Status) -> list[Group]:
        return [group for group in self.groups.values() if group.status == status]

    def _open(self) -> list[Group]:
        """Started and not yet taken, in the order in which they are to be taken."""
        return sorted((*self._with("running"), *self._with("finished")), key=_turn)

    def _in_time(self, groups: list[Group], taken: int) -> bool:
        """Whether all can be taken before they are too old, given that `taken` were taken at the present version."""
        per, bound = self.config.groups_per_version, self.config.max_staleness
        return all(
            self._version + (taken + place) // per <= group.version + bound
            for place, group in enumerate(sorted(groups, key=_turn))
        )

    def _conclude(self, group: Group) -> None:
        good, policy = len(group.good), self.config.on_failure
        self.changed.add(group.uid)
        if good == group.size or (policy == "accept_partial" and good >= self.config.min_sessions):
            group.status = "finished"
        elif policy == "fail":
            group.status = "failed"
        else:
            self._retry(group, group.reason)

    def _retry(self, group: Group, reason: str) -> None:
        group.reason = reason
        self.changed.add(group.uid)
        if group.attempt + 1 >= self.config.max_attempts:
            group.status = "failed"
            return
        self.abandoned.append((group.uid, group.attempt))
        group.status, group.attempt, group.settled = "pending", group.attempt + 1, {}


def _turn(group: Group) -> tuple[int, int]:
    return group.version, group.order
