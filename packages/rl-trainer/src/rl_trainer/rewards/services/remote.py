"""Scores over HTTP: one POST per sample (`http_service`).

    request   {"data_source": .., "solution_str": .., "ground_truth": .., "extra_info": {..}}
              JSON, the arguments of a reward function
    answer    0.5, or {"score": 0.5, "acc": 1, "pred": "42", ..}
              JSON, the result of a reward function

A sample without an answer is a Failure.
"""

from __future__ import annotations

import msgspec

from rl_protocol.errors import UNREADABLE
from rl_trainer.rewards.scorer import Failure, Outcome, Sample, outcome_of
from rl_trainer.rewards.scorer_toml import RemoteScorerConfig
from rl_trainer.rewards.services.service_scorer import ServiceScorer

_Answer = dict[str, float | str | bool | None] | float | None


class RemoteScorer(ServiceScorer[RemoteScorerConfig]):
    """Scorer over HTTP."""

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
