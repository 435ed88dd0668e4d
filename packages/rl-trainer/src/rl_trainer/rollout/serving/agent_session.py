"""Sessions of a run that an agent drives over HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence

from rl_protocol.ports import SamplingParams
from rl_trainer.data import PromptRow
from rl_trainer.rollout.serving.endpoint import Endpoint, EndpointConfig
from rl_trainer.rollout.serving.policy import over_session
from rl_trainer.rollout.serving.tokenizer import ChatTokenizer
from rl_trainer.rollout.session_turns import Generate, SessionKind, Trajectory

Agent = Callable[[PromptRow, str, str], Awaitable[None]]
"""(row, base_url, key): drives one session until it is done, in this process or by waiting for
another.
"""


def agent_session(
    agent: Agent, *, model: str, context: int, sampling: SamplingParams, tokenizer: ChatTokenizer | None = None
) -> SessionKind:
    """A kind of session for `rollout.session`, driven by an agent over HTTP.

    The agent's requests are generated together with those of the run's other sessions, and
    recorded. Each session has its own endpoint and key. Install it under the entry points
    `rl_trainer.sessions`.

    Args:
        agent: see Agent. An exception ends the run.
        model: the model name that the agent uses.
        context: most tokens of prompt and response together. No trajectory is longer than
            rollout.response_length either.
        sampling: the run's; requests with other settings are refused.
        tokenizer: for agents that send text.
    """

    async def run(row: PromptRow, generate: Generate) -> Sequence[Trajectory]:
        key = secrets.token_hex(32)
        room = min(context, len(row.prompt_ids) + sampling.max_new_tokens)  # a longer trajectory would end the run
        config = EndpointConfig(model=model, context=room, sampling=sampling, key=key.encode())
        async with (
            Endpoint(config, tokenizer) as endpoint,
            endpoint.session(row.prompt_ids, over_session(generate)) as one,
        ):
            await agent(row, one.base_url, key)
            return one.recorder.trajectories()

    return SessionKind(run)
