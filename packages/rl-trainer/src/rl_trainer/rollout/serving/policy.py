"""What an endpoint generates with: an engine, or the session of a run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Protocol

import msgspec

from rl_protocol import ConfigError
from rl_protocol.ports import Generation, RolloutEngine, SamplingParams
from rl_trainer.rollout.session_turns import Generate, request_of_turn


class Policy(Protocol):
    """The policy as one session calls it."""

    async def __call__(
        self, context: Sequence[int], max_tokens: int, seed: int | None, stop: Sequence[str]
    ) -> Generation:
        """Generate one response.

        Args:
            context: [C] token ids before it.
            max_tokens: most tokens of it.
            seed: of its random stream; None: the policy's.
            stop: strings that end it, besides those of the policy's sampling parameters.

        Raises:
            ConfigError: a seed was given where none can be chosen.
            RLError: the engine failed.
        """
        ...


def over_engine(engine: RolloutEngine, sampling: SamplingParams, uid: str, session: int = 0) -> Policy:
    """Call an engine directly.

    Each call has its own random stream, drawn from (seed, uid, session, number of the call).
    Cancelling a call aborts its generation.
    """
    numbers = itertools.count()

    async def ask(context: Sequence[int], max_tokens: int, seed: int | None, stop: Sequence[str]) -> Generation:
        request = request_of_turn(uid, session, next(numbers), context)
        params = msgspec.structs.replace(
            sampling,
            max_new_tokens=max_tokens,
            seed=sampling.seed if seed is None else seed,
            stop=(*sampling.stop, *stop),
        )
        (generation,) = await engine.generate([request], params)
        return generation

    return ask


def over_session(generate: Generate) -> Policy:
    """Call the policy as a session of a run, batched with its other sessions and with the run's
    seed.
    """

    async def ask(context: Sequence[int], max_tokens: int, seed: int | None, stop: Sequence[str]) -> Generation:
        if seed is not None:
            raise ConfigError("The seed of a run's sessions is LoopConfig.seed; leave seed out.")
        return await asyncio.shield(asyncio.ensure_future(generate(context, max_tokens, stop=stop)))

    return ask
