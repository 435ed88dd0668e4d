"""What an endpoint asks: an engine, or the session of a run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Protocol

import msgspec

from rl_protocol import ConfigError
from rl_protocol.ports import Generation, RolloutEngine, SamplingParams
from rl_trainer.sessions import Generate, request_of_turn


class Policy(Protocol):
    """The policy, as one session asks it."""

    async def __call__(self, context: Sequence[int], max_tokens: int, seed: int | None) -> Generation:
        """At most `max_tokens` tokens after these ids.

        Raises:
            ConfigError: a seed where none can be chosen.
            RLError: what the engine raised.
        """
        ...


def over_engine(engine: RolloutEngine, sampling: SamplingParams, uid: str, session: int = 0) -> Policy:
    """Ask an engine directly. Each call draws from a stream of its own, of (seed, uid, session, number of the call); cancelling one aborts it."""
    numbers = itertools.count()

    async def ask(context: Sequence[int], max_tokens: int, seed: int | None) -> Generation:
        request = request_of_turn(uid, session, next(numbers), context)
        params = msgspec.structs.replace(
            sampling, max_new_tokens=max_tokens, seed=sampling.seed if seed is None else seed
        )
        (generation,) = await engine.generate([request], params)
        return generation

    return ask


def over_session(generate: Generate) -> Policy:
    """Ask as a session of a run does, together with its other sessions and with the run's seed; one that gives up leaves them alone."""

    async def ask(context: Sequence[int], max_tokens: int, seed: int | None) -> Generation:
        if seed is not None:
            raise ConfigError("The seed of a run's sessions is trainer.seed; leave seed out.")
        return await asyncio.shield(asyncio.ensure_future(generate(context, max_tokens)))

    return ask
