"""Routes prompts to rollout replicas. The router is pure; `roll_out` sends the calls.

even: equally many sessions to each replica, fixed before the first call: the same in every run
least_loaded: small pieces, each to the replica with the least work left, for replicas or prompts
    of unequal speed
prefix_sticky: prompts with the same beginning to the same replica, unless it is overloaded:
    consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018) over rendezvous
    hashing (Thaler, Ravishankar 1998)

Responses do not depend on the routing, since each is drawn from (seed, uid, session). All sessions
of a lease go to the same replica.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from rl_protocol import ConfigError, balanced_parts
from rl_trainer.asyncio_tasks import gather_or_cancel
from rl_trainer.config.rollout import ROUTERS
from rl_trainer.workers.messages import LeasedPrompt, RolloutCall, RolloutResult

OVERLOAD = 1.1
"""A replica is overloaded above this multiple of the mean load."""
_PIECES = 4
"""Pieces per replica into which a call is cut."""
_IN_FLIGHT = 2
"""Pieces a replica has at a time: one more than it works on, so that it never waits for the driver.
"""


class Router:
    """Chooses the replica of each piece of work, and tracks the load of each replica.

    >>> router = Router("least_loaded", 2)
    >>> router.choose("a", 3), router.choose("b", 1), router.choose("c", 1)
    (0, 1, 1)

    Args:
        policy: `even` takes turns; for the others see above.
        replicas: number of replicas, R >= 1.
        overload: see OVERLOAD; at least 1.

    Attributes:
        loads: [R] cost of the unfinished work of each replica.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(self, policy: str, replicas: int, overload: float = OVERLOAD) -> None:
        if policy not in ROUTERS:
            raise ConfigError(f"RolloutConfig.router must be one of {', '.join(ROUTERS)}; got {policy!r}.")
        if replicas < 1 or not 1 <= overload < math.inf:
            raise ConfigError(
                f"A router needs at least 1 replica and an overload of at least 1; got {replicas}, {overload}."
            )
        self.loads = [0] * replicas
        self._policy = policy
        self._overload = overload
        self._given = [0] * replicas
        self._turn = 0

    def choose(self, prefix: str, cost: int) -> int:
        """The replica for work that begins with `prefix`.

        `cost` >= 0 is its size in any one unit, such as sessions or tokens.
        """
        match self._policy:
            case "even":
                replica, self._turn = self._turn, (self._turn + 1) % len(self.loads)
            case "least_loaded":
                # ties go to the replica with the least work so far
                replica = min(range(len(self.loads)), key=lambda one: (self.loads[one], self._given[one]))
            case _:
                most = self._overload * (sum(self.loads) + cost) / len(self.loads)
                # the least loaded replica is below the bound, so one is always found
                replica = next(replica for replica in preferred(prefix, len(self.loads)) if self.loads[replica] <= most)
        self.loads[replica] += cost
        self._given[replica] += cost
        return replica

    def done(self, replica: int, cost: int) -> None:
        """Record that the replica has finished work of that cost."""
        self.loads[replica] -= cost


def preferred(prefix: str, replicas: int) -> list[int]:
    """All replicas in the order of preference for a prefix.

    One more replica takes over 1 / R of all prefixes and moves no other.

    >>> preferred("train/7", 3) == preferred("train/7", 3)
    True
    """
    weights = [hashlib.blake2b(f"{replica}/{prefix}".encode(), digest_size=8).digest() for replica in range(replicas)]
    return sorted(range(replicas), key=weights.__getitem__, reverse=True)


def imbalance(tokens: Sequence[int]) -> float:
    """Tokens of the busiest replica over the mean: 1 is even, R is one replica doing all of it.

    >>> imbalance([30, 10])
    1.5
    """
    return max(tokens) * len(tokens) / sum(tokens) if sum(tokens) else 1.0


def num_sessions(prompts: Sequence[LeasedPrompt]) -> int:
    """Number of sessions of these prompts, which is their cost."""
    return sum(len(prompt.lease.sessions) for prompt in prompts)


async def roll_out(
    replicas: int, whole: RolloutCall, policy: str, send: Callable[[int, RolloutCall], Awaitable[RolloutResult]]
) -> list[RolloutResult]:
    """Have replicas run a call together.

    Args:
        replicas: number of replicas.
        whole: the call.
        policy: name of the routing policy.
        send: sends part of the call to a replica.

    Raises:
        RLError: `send` failed; the first failure cancels the rest.
    """
    router = Router(policy, replicas)

    async def give(replica: int, prompts: tuple[LeasedPrompt, ...]) -> RolloutResult:
        return await send(replica, msgspec.structs.replace(whole, prompts=prompts, side_by_side=replicas))

    if policy == "least_loaded":
        room = asyncio.Semaphore(_IN_FLIGHT * replicas)

        async def give_next(prompts: tuple[LeasedPrompt, ...]) -> RolloutResult:
            async with room:
                cost = num_sessions(prompts)
                replica = router.choose("", cost)
                try:
                    return await give(replica, prompts)
                finally:
                    router.done(replica, cost)

        return await gather_or_cancel(*(give_next(piece) for piece in _pieces(whole.prompts, replicas)))
    shares = _shares(router, whole, policy)
    return await gather_or_cancel(*(give(replica, prompts) for replica, prompts in enumerate(shares) if prompts))


def _shares(router: Router, whole: RolloutCall, policy: str) -> list[tuple[LeasedPrompt, ...]]:
    """The prompts of each replica, in the order of the call."""
    prompts, replicas = whole.prompts, len(router.loads)
    if policy == "even":
        parts = balanced_parts([num_sessions([prompt]) for prompt in prompts], replicas)
        return [tuple(prompts[place] for place in part) for part in parts]
    chosen = [router.choose(f"{whole.partition.split}/{prompt.row}", num_sessions([prompt])) for prompt in prompts]
    pairs = list(zip(prompts, chosen, strict=True))
    return [tuple(prompt for prompt, its in pairs if its == replica) for replica in range(replicas)]


def _pieces(prompts: Sequence[LeasedPrompt], replicas: int) -> list[tuple[LeasedPrompt, ...]]:
    size = max(1, len(prompts) // (_PIECES * replicas))
    return [tuple(prompts[start : start + size]) for start in range(0, len(prompts), size)]
