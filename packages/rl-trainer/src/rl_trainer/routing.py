"""Which rollout replica is given what. The router is pure; `roll_out` does what it says.

even            as many prompts to each, settled before the first is sent: the same in every run
least_loaded    small pieces, each to the replica that has least left to do when its turn comes: for replicas or prompts of unequal speed
prefix_sticky   what begins alike goes to the replica that computed it before, unless that one has too much to do: consistent hashing with
                bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018), over rendezvous hashing (Thaler, Ravishankar 1998)

What is generated does not depend on any of this: a response is drawn from (seed, uid, session) alone. All sessions of a prompt stay together.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence

import msgspec

from rl_protocol import ConfigError, balanced_parts
from rl_trainer.dispatch import WorkerHandle, call, together
from rl_trainer.messages import PromptRef, RolloutCall, RolloutResult

ROUTERS = ("even", "least_loaded", "prefix_sticky")
OVERLOAD = 1.1
"""A replica has too much to do when it has more than this many times the mean."""
_PIECES = 4
"""Pieces a replica would get of an evenly spread call."""
_IN_FLIGHT = 2
"""Pieces a replica has at a time: one more than it works on, so that it need not wait for the driver."""


class Router:
    """Chooses the replica of each piece of work, and remembers what each has left to do.

    >>> router = Router("least_loaded", 2)
    >>> router.choose("a", 3), router.choose("b", 1), router.choose("c", 1)
    (0, 1, 1)

    Args:
        policy: `even` takes turns; the others as above.
        replicas: how many there are, R >= 1.
        overload: see OVERLOAD; at least 1.

    Attributes:
        loads: [R] cost of what each was given and has not done.

    Raises:
        ConfigError: an argument out of range.
    """

    def __init__(self, policy: str, replicas: int, overload: float = OVERLOAD) -> None:
        if policy not in ROUTERS:
            raise ConfigError(f"rollout.router must be one of {', '.join(ROUTERS)}; got {policy!r}.")
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
        """The replica for work that begins with `prefix` and costs `cost` >= 0 (sessions or tokens, as long as it is the same always)."""
        match self._policy:
            case "even":
                replica, self._turn = self._turn, (self._turn + 1) % len(self.loads)
            case "least_loaded":
                # of several that have as little to do, the one that was given least so far
                replica = min(range(len(self.loads)), key=lambda one: (self.loads[one], self._given[one]))
            case _:
                most = self._overload * (sum(self.loads) + cost) / len(self.loads)
                # one has at most the mean, so there is always one
                replica = next(replica for replica in preferred(prefix, len(self.loads)) if self.loads[replica] <= most)
        self.loads[replica] += cost
        self._given[replica] += cost
        return replica

    def done(self, replica: int, cost: int) -> None:
        """The replica has finished work of that cost."""
        self.loads[replica] -= cost


def preferred(prefix: str, replicas: int) -> list[int]:
    """All replicas, those first that a prefix is sent to first. One more replica takes over 1 / R of all prefixes and moves no other.

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


async def roll_out(
    workers: Sequence[WorkerHandle], whole: RolloutCall, policy: str, timeout_s: float
) -> tuple[list[RolloutResult], float]:
    """Have the replicas do a call together; what each answered, and the imbalance of their response tokens.

    Raises:
        RLError: what a replica raised; the first ends all.
    """
    router = Router(policy, len(workers))
    tokens = [0] * len(workers)

    async def give(replica: int, prompts: tuple[PromptRef, ...]) -> RolloutResult:
        part = msgspec.structs.replace(whole, prompts=prompts)
        result = await call(workers[replica], "rollout", part, RolloutResult, timeout_s)
        tokens[replica] += result.tokens
        return result

    if policy == "least_loaded":
        room = asyncio.Semaphore(_IN_FLIGHT * len(workers))

        async def give_next(prompts: tuple[PromptRef, ...]) -> RolloutResult:
            async with room:
                cost = len(prompts) * whole.n
                replica = router.choose("", cost)
                try:
                    return await give(replica, prompts)
                finally:
                    router.done(replica, cost)

        results = await together(*(give_next(piece) for piece in _pieces(whole.prompts, len(workers))))
    else:
        shares = _shares(router, whole, policy)
        results = await together(*(give(replica, prompts) for replica, prompts in enumerate(shares) if prompts))
    return results, imbalance(tokens)


def _shares(router: Router, whole: RolloutCall, policy: str) -> list[tuple[PromptRef, ...]]:
    """The prompts of each replica, in the order of the call."""
    prompts, replicas = whole.prompts, len(router.loads)
    if policy == "even":
        parts = balanced_parts([1] * len(prompts), replicas)
        return [tuple(prompts[place] for place in part) for part in parts]
    chosen = [router.choose(f"{whole.split}/{prompt.row}", whole.n) for prompt in prompts]
    pairs = list(zip(prompts, chosen, strict=True))
    return [tuple(prompt for prompt, its in pairs if its == replica) for replica in range(replicas)]


def _pieces(prompts: Sequence[PromptRef], replicas: int) -> list[tuple[PromptRef, ...]]:
    size = max(1, len(prompts) // (_PIECES * replicas))
    return [tuple(prompts[start : start + size]) for start in range(0, len(prompts), size)]
