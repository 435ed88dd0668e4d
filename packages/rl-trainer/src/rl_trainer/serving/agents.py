"""Sessions of a run that an agent drives over HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence

from rl_protocol.ports import SamplingParams
from rl_trainer.data import PromptRow
from rl_trainer.serving.codec import TextCodec
from rl_trainer.serving.endpoint import Endpoint, EndpointConfig
from rl_trainer.serving.policies import over_session
from rl_trainer.sessions import Generate, SessionKind, Trajectory

Agent = Callable[[PromptRow, str, str], Awaitable[None]]
"""(row, base_url, key): drives one session until it is done, in this process or by waiting for another; it need not know what it is part of."""


def agent_session(
    agent: Agent, *, model: str, context: int, sampling: SamplingParams, codec: TextCodec | None = None
) -> SessionKind:
    """A kind of session for `rollout.session`: what the agent asks of the endpoint is generated with the run's other sessions, and recorded.

    Every session has an endpoint, and a key, of its own. Install it under the entry points `rl_trainer.sessions`.

    Args:
        agent: see Agent. What it raises ends the run.
        model: the name it asks for.
        context: most tokens of the model, prompt and response together; no trajectory is longer than rollout.response_length either.
        sampling: the run's; requests that name others are refused.
        codec: for agents that speak words.
    """

    async def run(row: PromptRow, generate: Generate) -> Sequence[Trajectory]:
        key = secrets.token_hex(32)
        room = min(context, len(row.prompt_ids) + sampling.max_new_tokens)  # a longer trajectory would end the run
        config = EndpointConfig(model=model, context=room, sampling=sampling, key=key.encode())
        async with Endpoint(config, codec) as endpoint, endpoint.session(row.prompt_ids, over_session(generate)) as one:
            await agent(row, one.base_url, key)
            return one.recorder.trajectories()

    return SessionKind(run)
