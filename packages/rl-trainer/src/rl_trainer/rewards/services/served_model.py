"""A reward model that vLLM serves as a classifier, asked for its logit over HTTP.

    request   POST URL/classify {"model": .., "input": [token ids], "use_activation": false}
    answer    {"data": [{"probs": [logit]}]}

`vllm serve FOLDER --runner pooling` serves a sequence classification model with one label. The
engine shards it, batches the requests that are under way, and may use GPUs of its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rl_protocol.errors import UNREADABLE
from rl_trainer.rewards.scorer import Failure, Outcome, Sample, outcome_of
from rl_trainer.rewards.scorer_toml import ServedModelConfig
from rl_trainer.rewards.services.http_service import HttpService


class _Item(msgspec.Struct, frozen=True):
    probs: list[float]


class _Answer(msgspec.Struct, frozen=True):
    """The part of a classification that is read."""

    data: list[_Item]


class ServedModelScorer:
    """Scores a response with the served model's logit for prompt and response.

    The model gets the policy's token ids. A sequence that it does not take, such as one that is too
    long, is a Failure of its sample.

    Args:
        served: address, model, limits and retries.
        timeout_s: time limit of a sample from its first attempt to its answer, not counting the
            wait for a slot; where the settings have none.
        environment: contains the key.
        clock: seconds, for the rate limit.

    Raises:
        ConfigError: the key is not in the environment.
    """

    reads_tokens: bool = True
    compares: bool = False

    def __init__(
        self,
        served: ServedModelConfig,
        timeout_s: float,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = served.model
        self._service = HttpService(
            served, timeout_s, "ServedModelScorer.timeout_s", path="/classify", environment=environment, clock=clock
        )

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        return list(await asyncio.gather(*map(self._one, samples)))

    async def close(self) -> None:
        """Close all connections; safe to call twice."""
        await self._service.close()

    async def _one(self, sample: Sample) -> Outcome:
        if not sample.tokens:
            return Failure(kind="exception", message="has no tokens to score")
        asked = {"model": self._model, "input": list(sample.tokens), "use_activation": False}
        answer = await self._service.post(msgspec.json.encode(asked))
        if isinstance(answer, Failure):
            return answer
        try:
            found = msgspec.json.decode(answer, type=_Answer).data
        except UNREADABLE as error:
            return Failure(kind="no_number", message=f"answered with something that is not a classification: {error}")
        labels = [len(item.probs) for item in found]
        if labels != [1]:
            message = f"answered with {labels} labels for one sequence; a reward model has one label"
            return Failure(kind="no_number", message=message)
        return outcome_of(found[0].probs[0])
