"""A reward model that vLLM serves as a classifier, asked for its logit over HTTP.

    request   POST URL/classify {"model": .., "input": [token ids], "use_activation": false}
    answer    {"data": [{"probs": [logit]}]}

`vllm serve FOLDER --runner pooling` serves a sequence classification model with one label. The
engine shards it, batches the requests that are under way, and may use GPUs of its own.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from rl_protocol.errors import UNREADABLE
from rl_trainer.rewards.scorer import Failure, Outcome, Sample, outcome_of
from rl_trainer.rewards.scorer_toml import ServedModelConfig
from rl_trainer.rewards.services.service_scorer import ServiceScorer


class _Item(msgspec.Struct, frozen=True):
    probs: list[float]


class _Answer(msgspec.Struct, frozen=True):
    """The part of a classification that is read."""

    data: list[_Item]


class ServedModelScorer(ServiceScorer[ServedModelConfig]):
    """Scores a response with the served model's logit for prompt and response.

    The model gets the policy's token ids. A sequence that it does not take, such as one that is too
    long, is a Failure of its sample.
    """

    PATH: ClassVar[str] = "/classify"
    reads_tokens: bool = True

    async def _one(self, sample: Sample) -> Outcome:
        if not sample.tokens:
            return Failure(kind="exception", message="has no tokens to score")
        asked = {"model": self._config.model, "input": list(sample.tokens), "use_activation": False}
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
