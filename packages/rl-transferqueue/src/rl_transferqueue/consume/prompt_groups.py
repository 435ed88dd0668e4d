"""States of prompt groups between data set and trainer: the pure core of the replay buffer.

    add -> pending -> running -> finished -> taken -> (committed, forgotten)
              ^          |           |
              +--refill--+--too old--+        failed: `take` raises until the group is discarded

A group of any status can be discarded; sessions of a running one that settle later are refused.

A group is one prompt with `size` sessions (rollouts). It is leased as a whole, concluded when every
session has settled or the lease has ended, and taken as a whole. Each lease is a new *attempt* with
new session numbers, so rows of an earlier attempt can't be mistaken for this one's or overwrite
them. The caller passes the times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from rl_protocol.batch.row_key import key_text
from rl_protocol.counted import counted
from rl_protocol.errors import BatchError, ConfigError, RolloutError
from rl_protocol.ports import GroupFailure, GroupStatus, Lease
from rl_protocol.ports.replay import Outcome

STATUSES: tuple[GroupStatus, ...] = get_args(GroupStatus)
_OUTCOMES: dict[GroupStatus, Outcome] = {"finished": "partial", "failed": "failed"}
"""Outcome of an attempt with failed sessions, by the status of its group after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """How a replay buffer treats late, stale and failed groups.

    Raises:
        ConfigError: a value is out of range; the message names it.
    """

    groups_per_version: int
    """Groups that the trainer takes per policy version."""
    max_staleness: int = 0
    """Maximum difference between the policy version a group is trained with and started with."""
    when_stale: Literal["drop", "wait"] = "wait"
    """wait: producers, then the trainer, wait so that no group becomes too old before it is taken.
    drop: nothing waits; a group that is too old is started again."""
    on_failure: Literal["fail", "refill", "accept_partial"] = "refill"
    """What to do with a group that has failed or unsettled sessions when it is concluded.
    fail: the group fails. refill: the prompt is started again. accept_partial: the group is
    finished if at least `min_sessions` sessions succeeded, and started again otherwise."""
    min_sessions: int = 1
    """For accept_partial."""
    max_attempts: int = 3
    """Number of attempts, for any reason, before a group fails."""
    lease_s: float = 600.0
    """Seconds that a lease lasts."""

    def __post_init__(self) -> None:
        for name, low in (("groups_per_version", 1), ("max_staleness", 0), ("min_sessions", 1), ("max_attempts", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"ReplayConfig.{name} must be at least {low}; got {getattr(self, name)}.")
        if not 0 < self.lease_s < float("inf"):
            raise ConfigError(f"ReplayConfig.lease_s must be a positive number of seconds; got {self.lease_s}.")


@dataclass(slots=True, kw_only=True)
class Group:
    """The state of one prompt; only `GroupBook` changes it."""

    uid: str
    size: int
    order: int
    """Position in the order of adding."""
    status: GroupStatus = "pending"
    attempt: int = 0
    version: int = 0
    """Policy version of this attempt."""
    reason: str = ""
    """Why the last attempt failed."""
    lease_until: float = 0.0
    settled: dict[int, int] = field(default_factory=dict[int, int])
    """Rows by session of this attempt; 0 for a session that failed."""

    @property
    def sessions(self) -> range:
        """Session numbers of this attempt."""
        return range(self.attempt * self.size, (self.attempt + 1) * self.size)

    @property
    def good(self) -> list[int]:
        """Sessions that have rows, ascending."""
        return [session for session, rows in sorted(self.settled.items()) if rows]

    @property
    def row_keys(self) -> list[str]:
        """Keys of the trajectories of this attempt, session by session."""
        return [key_text(self.uid, session, i) for session in self.good for i in range(self.settled[session])]


class GroupBook:
    """All groups of one buffer.

    Every operation checks its arguments before it changes anything. The caller then clears all of
    `forgotten` (uids) and the rows of `abandoned` (uid, attempt), saves the state of `changed`
    (uids), and empties these. `failures` grows with each attempt that fails, until the caller
    empties it.
    """

    def __init__(self, config: ReplayConfig, partition: str = "") -> None:
        self.config = config
        self.partition = partition
        self.groups: dict[str, Group] = {}
        self.changed: set[str] = set()
        self.forgotten: set[str] = set()
        self.abandoned: list[tuple[str, int]] = []
        self.failures: list[GroupFailure] = []
        self._order = 0
        self._version = 0
        self._taken = 0

    def add(self, uids: Sequence[str], size: int | Sequence[int]) -> None:
        """Add pending prompts with `size` sessions each, or with a size for each.

        Raises:
            BatchError: a uid is already there or occurs twice, a size is below 1, or the sizes are
                not as many as the prompts; nothing is added.
        """
        sizes = [size] * len(uids) if isinstance(size, int) else size
        if len(sizes) != len(uids):
            raise BatchError(f"Each of {len(uids)} groups needs a size; got {len(sizes)} sizes.")
        seen = set(self.groups)
        for uid, its in zip(uids, sizes, strict=True):
            if uid in seen or its < 1:
                raise BatchError(
                    f"Group {uid!r} of {its} sessions can't be added: it is already there, or has no session."
                )
            seen.add(uid)
        for uid, its in zip(uids, sizes, strict=True):
            self.restore(Group(uid=uid, size=its, order=self._order))
        self.changed |= set(uids)

    def restore(self, group: Group) -> None:
        """Add a saved group; one that was taken and never committed becomes finished."""
        group.status = "finished" if group.status == "taken" else group.status
        self.groups[group.uid] = group
        self._order = max(self._order, group.order + 1)

    def without_sessions(self) -> list[str]:
        """Finished groups of which no session is known: their clearing has begun."""
        return [group.uid for group in self._with("finished") if not group.settled]

    def restart_damaged(self, rows: Collection[str]) -> None:
        """Start the finished groups again of which a trajectory is not among these row keys.

        A plane drops rows whose bytes were damaged. `max_attempts` does not count such an attempt.
        """
        for group in self._with("finished"):
            if lost := [key for key in group.row_keys if key not in rows]:
                self._begin_again(group, f"{len(lost)} of its rows were lost, the first is {lost[0]!r}")

    @property
    def version(self) -> int:
        """The newest policy version that was named."""
        return self._version

    def pending(self, uids: Collection[str]) -> list[str]:
        """Those of these groups that are pending, oldest first."""
        return [group.uid for group in self._pending(uids)]

    def start(self, count: int, version: int, now: float, uids: Collection[str] | None = None) -> list[Lease]:
        """Start up to `count` pending groups with policy `version`, oldest first; of `uids`, if
        given.

        Raises:
            BatchError: the count is below 1.
        """
        if count < 1:
            raise BatchError(f"A call leases at least 1 group; got {count}.")
        self._version, self._taken = max((self._version, self._taken), (version, 0))
        leases: list[Lease] = []
        for group in self._pending(uids)[:count]:
            before = group.version
            group.version = version
            if self.config.when_stale == "wait" and not self._in_time([*self._open(), group], self._taken):
                group.version = before
                break
            group.status, group.lease_until = "running", now + self.config.lease_s
            group.settled = {}
            self.changed.add(group.uid)
            sessions = tuple(group.sessions)
            leases.append(Lease(self.partition, group.uid, group.attempt, sessions, version, self.config.lease_s))
        return leases

    def settle(self, uid: str, attempt: int, sessions: Sequence[int], rows: int, reason: str = "") -> list[int]:
        """Record that each of these sessions has ended with `rows` rows, or failed (0 rows). May be
        repeated.

        Returns:
            The sessions that came too late, so that their rows must be cleared.
        """
        if self.is_over(uid, attempt):
            return list(sessions)
        group = self.groups[uid]
        own = group.sessions if group.status == "running" else ()
        new = [session for session in sessions if session not in group.settled]
        counted = [session for session in new if session in own]
        if counted:
            group.settled |= dict.fromkeys(counted, rows)
            group.reason = group.reason if rows else f"session {counted[-1]}: {reason}"
            if len(group.settled) == group.size:
                self._conclude(group)
        return [session for session in new if session not in own]

    def is_over(self, uid: str, attempt: int) -> bool:
        """Whether no session of an attempt counts: the group is gone, or begins again."""
        group = self.groups.get(uid)
        return group is None or group.attempt != attempt or group.status == "pending"

    def expire(self, now: float) -> None:
        """Conclude the groups whose lease has ended."""
        for group in [g for g in self._with("running") if g.lease_until <= now]:
            missing = sorted(set(group.sessions) - set(group.settled))
            group.reason = f"the lease of {self.config.lease_s:g} s ended before sessions {missing} settled"
            self._conclude(group)

    def next_expiry(self) -> float | None:
        """When the next lease ends."""
        return min((group.lease_until for group in self._with("running")), default=None)

    def check_take(self, count: int, version: int) -> None:
        """Check the arguments of `take`.

        Raises:
            BatchError: the version is older than a previous one, or the count is below 1.
        """
        if version < self._version or count < 1:
            raise BatchError(
                f"A batch has at least 1 group, and versions never decrease; got {count} groups and version {version} "
                f"after {self._version}."
            )

    def take(self, count: int, version: int, uids: Collection[str] | None = None) -> list[Group] | None:
        """Take the `count` oldest finished groups to train policy `version`; None if too few.

        With `uids`, takes none but these.

        Raises:
            RolloutError: a group has failed; it is never skipped silently.
            BatchError: the version is older than a previous one.
        """
        self.check_take(count, version)
        if failed := [group for group in self._with("failed") if uids is None or group.uid in uids]:
            first = failed[0]
            raise RolloutError(
                f"The rollout of {counted(len(failed), 'prompt')} failed. The first is {first.uid!r}, in attempt {first.attempt + 1}: "
                f"{first.reason.rstrip('.')}. Set ReplayConfig.on_failure=refill to roll such prompts out again, at most "
                "ReplayConfig.max_attempts times, or discard their groups."
            )
        self._version, self._taken = max((self._version, self._taken), (version, 0))
        for group in self._with("finished"):
            if version - group.version > self.config.max_staleness:
                self._retry(group, f"of policy version {group.version}, too old for version {version}")
        ready = [g for g in self._open() if g.status == "finished" and (uids is None or g.uid in uids)][:count]
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
        return ready

    def forget(self, uids: Sequence[str], status: GroupStatus | None = None) -> list[Group]:
        """Remove and return groups, which must have that status if one is given.

        Raises:
            BatchError: a group is missing or has another status; nothing is removed.
        """
        for uid in uids:
            if uid not in self.groups:
                raise BatchError(f"Group {uid!r} is not there.")
            if status is not None and self.groups[uid].status != status:
                raise BatchError(f"Group {uid!r} is {self.groups[uid].status}, not {status}.")
        self.changed -= set(uids)
        self.forgotten |= set(uids)
        return [self.groups.pop(uid) for uid in dict.fromkeys(uids)]

    def undo(self, uids: Sequence[str]) -> None:
        """Reset groups that were started or taken for a caller that did not get them."""
        for uid in uids:
            group = self.groups[uid]
            if group.status == "taken":
                self._taken -= 1
            group.status = "finished" if group.status == "taken" else "pending"
            self.changed.add(uid)

    def counts(self) -> dict[GroupStatus, int]:
        """Number of groups by status; any thread may ask."""
        seen = Counter(group.status for group in list(self.groups.values()))
        return {status: seen[status] for status in STATUSES}

    def statuses(self) -> dict[str, GroupStatus]:
        """Status of each group by uid, in the order of adding; any thread may ask."""
        return {group.uid: group.status for group in sorted(self.groups.values(), key=lambda group: group.order)}

    def unsettled(self) -> dict[str, tuple[int, ...]]:
        """Sessions of running groups that have not settled, by uid; any thread may ask."""
        running = [group for group in list(self.groups.values()) if group.status == "running"]
        return {group.uid: tuple(sorted({*group.sessions} - group.settled.keys())) for group in running}

    def _with(self, status: GroupStatus) -> list[Group]:
        return [group for group in self.groups.values() if group.status == status]

    def _pending(self, uids: Collection[str] | None) -> list[Group]:
        """Pending groups, oldest first; of `uids`, if given."""
        found = (group for group in self._with("pending") if uids is None or group.uid in uids)
        return sorted(found, key=lambda group: group.order)

    def _open(self) -> list[Group]:
        """Running and finished groups, in the order in which they are taken."""
        return sorted((*self._with("running"), *self._with("finished")), key=_turn)

    def _in_time(self, groups: list[Group], taken: int) -> bool:
        """Whether all groups can be taken in time after `taken` groups of the current version."""
        per, bound = self.config.groups_per_version, self.config.max_staleness
        return all(
            self._version + (taken + place) // per <= group.version + bound
            for place, group in enumerate(sorted(groups, key=_turn))
        )

    def _conclude(self, group: Group) -> None:
        good, policy, attempt = len(group.good), self.config.on_failure, group.attempt
        self.changed.add(group.uid)
        if good == group.size or (policy == "accept_partial" and good >= self.config.min_sessions):
            group.status = "finished"
        elif policy == "fail":
            group.status = "failed"
        else:
            self._retry(group, group.reason)
        if good < group.size:
            failed = group.size - good
            outcome: Outcome = _OUTCOMES.get(group.status, "retried")
            self.failures.append(
                GroupFailure(uid=group.uid, attempt=attempt, sessions=failed, reason=group.reason, outcome=outcome)
            )

    def _retry(self, group: Group, reason: str) -> None:
        if group.attempt + 1 >= self.config.max_attempts:
            group.reason, group.status = reason, "failed"
            self.changed.add(group.uid)
        else:
            self._begin_again(group, reason)

    def _begin_again(self, group: Group, reason: str) -> None:
        self.abandoned.append((group.uid, group.attempt))
        self.changed.add(group.uid)
        group.reason = reason
        group.status, group.attempt, group.settled = "pending", group.attempt + 1, {}


def _turn(group: Group) -> tuple[int, int]:
    return group.version, group.order
