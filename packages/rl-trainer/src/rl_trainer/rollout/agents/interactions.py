"""Who talks with the policy: gives the next message of the user, and ends the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from rl_protocol import RolloutError
from rl_trainer.config.registry import Registry
from rl_trainer.rollout.agents.threads import in_thread


class Interaction(Protocol):
    """The other side of one conversation."""

    def reply(self, text: str) -> str | None:
        """The next message of the user, after a turn of the policy that calls no tool; None: the
        conversation ends. Runs in a thread of its own; what it raises ends the session as failed.
        """
        ...


@dataclass(frozen=True)
class InteractionKind:
    """An interaction as packages register it: `INTERACTION = InteractionKind(Critic)`."""

    make: Callable[..., Interaction]
    """Makes the interaction of one session, from the row's `interaction_kwargs` besides `name`."""


INTERACTIONS = Registry("AgentConfig.interactions", "rl_trainer.interactions", InteractionKind, {}, {})


async def replied(interaction: Interaction, text: str, timeout_s: float) -> str | None:
    """The reply to a turn.

    Raises:
        RolloutError: there is none within `timeout_s`, or it is no text.
    """
    try:
        async with asyncio.timeout(timeout_s):
            # it may ignore its declared return type
            reply = cast(object, await in_thread(lambda: interaction.reply(text)))
    except TimeoutError as error:
        raise RolloutError(
            f"{type(interaction).__name__} gave no reply within AgentConfig.call_timeout_s={timeout_s:g}."
        ) from error
    if reply is not None and not isinstance(reply, str):
        raise RolloutError(
            f"{type(interaction).__name__} replied with {type(reply).__name__} in place of a text or None."
        )
    return reply
