"""Options of what happens to prompts whose rollouts fail."""

from __future__ import annotations

from dataclasses import dataclass

from rl_protocol.support.options import Options, option

ON_FAILURE = ("fail", "refill", "accept_partial")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Options):
    """What happens to prompts whose rollouts fail."""

    on_failure: str = option(
        "fail",
        "a failed response: fail ends the run; refill generates the responses to its prompt again, and after "
        "ReplayConfig.max_attempts takes another prompt; accept_partial trains on the other responses to the prompt, and "
        "treats a prompt without any like refill",
        choices=ON_FAILURE,
    )
    max_attempts: int = option(
        3, "most attempts at a prompt", ge=1, needs="on_failure=refill or on_failure=accept_partial"
    )
    lease_s: float = option(
        3600.0,
        "longest time in which a rollout worker must finish its prompts, seconds, restarts of its process included; then they have failed",
        gt=0,
    )
