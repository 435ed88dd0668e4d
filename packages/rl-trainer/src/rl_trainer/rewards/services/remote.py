"""Scores over HTTP: one POST per sample (`http_service`).

    request   {"data_source": .., "solution_str": .., "ground_truth": .., "extra_info": {..}}
              JSON, the arguments of a reward function
    answer    0.5, or {"score": 0.5, "acc": 1, "pred": "42", ..}
              JSON, the result of a reward function

A sample without an answer is a Failure.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rl_protocol.errors import UNREADABLE
from rl_trainer.rewards.scorer import Failure, Outcome, Sample, outcome_of
from rl_trainer.rewards.scorer_toml import RemoteScorerConfig
from rl_trainer.rewards.services.http_service import HttpService

_Answer = dict[str, float | str | bool | None] | float | None


class RemoteScorer:
    """Scorer over HTTP.

    Args:
        remote: address, limits and retries.
        timeout_s: time limit of a sample from its first attempt to its answer, not counting the
            wait for a slot; where the settings have none.
        environment: contains the key.
        clock: seconds, for the rate limit.

    Raises:
        ConfigError: the key is not in the environment.
    """

    reads_tokens: bool = False
    compares: bool = False

    def __init__(
        self,
        remote: RemoteScorerConfig,
        timeout_s: float,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = HttpService(remote, timeout_s, "RemoteScorer.timeout_s", environment=environment, clock=clock)

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        return list(await asyncio.gather(*map(self._one, samples)))

    async def close(self) -> None:
        """Close all connections; safe to call twice."""
        await self._service.close()

    async def _one(self, sample: Sample) -> Outcome:
        body = msgspec.json.encode(
            {
                "data_source": sample.data_source,
                "solution_str": sample.solution_str,
                "ground_truth": sample.ground_truth,
                "extra_info": sample.extra_info,
            }
        )
        answer = await self._service.post(body)
        if isinstance(answer, Failure):
            return answer
        try:
            return outcome_of(msgspec.json.decode(answer, type=_Answer))
        except UNREADABLE as error:
            return Failure(kind="no_number", message=f"answered with something that is not a score: {error}")
