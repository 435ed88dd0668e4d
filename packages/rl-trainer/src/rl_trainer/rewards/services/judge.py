"""A language model as a judge: it reads a rubric with the prompt and the response, and scores it.

It is asked over OpenAI's chat completions, which vLLM, SGLang and most providers serve. LLM-as-a-
judge: Zheng et al. 2023, arXiv 2306.05685.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import msgspec

from rl_protocol.errors import UNREADABLE
from rl_trainer.rewards.scorer import Failure, Outcome, Sample, Scored
from rl_trainer.rewards.scorer_toml import JudgeConfig
from rl_trainer.rewards.services.answer_cache import AnswerCache
from rl_trainer.rewards.services.rubric import question, verdict
from rl_trainer.rewards.services.service_scorer import ServiceScorer

CACHED = "cached"
"""Number of an outcome: 1 if no question was sent for it, because the answer was in the cache or
the same question was under way; else 0.
"""


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message


class _Answer(msgspec.Struct, frozen=True):
    """The part of a chat completion that is read."""

    choices: list[_Choice]


class JudgeScorer(ServiceScorer[JudgeConfig]):
    """Scores a response by the answer of a model to a rubric.

    Equal questions are asked once, also while the first is under way. With a cache, an answer with
    a score is kept under the SHA-256 of its request: model, rubric, prompt, response and sampling
    settings. A question without a usable answer is a Failure, never a score.

    Args:
        config: address, model, rubric, scale, limits and retries.
        timeout_s: see ServiceScorer.
        environment: contains the key.
        clock: see ServiceScorer.

    Raises:
        ConfigError: the key is not in the environment, or the cache can't be opened.
    """

    PATH: ClassVar[str] = "/chat/completions"
    reads_tokens: bool = True

    def __init__(
        self,
        config: JudgeConfig,
        timeout_s: float,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, timeout_s, environment, clock)
        self._cache = AnswerCache(Path(config.cache).expanduser()) if config.cache else None
        self._asked: dict[bytes, asyncio.Task[Outcome]] = {}
        """Questions that are under way, by key."""

    async def close(self) -> None:
        """Cancel what is under way, and close all connections and the cache; safe to call twice."""
        under_way = list(self._asked.values())
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await super().close()
        if self._cache is not None:
            self._cache.close()

    async def _one(self, sample: Sample) -> Outcome:
        body = self._request(sample)
        key = hashlib.sha256(body).digest()
        if (asked := self._asked.get(key)) is not None:
            outcome = await asyncio.shield(asked)
            return self._noted(outcome, cached=True) if isinstance(outcome, Scored) else outcome
        self._asked[key] = asyncio.create_task(self._answered(key, body))
        self._asked[key].add_done_callback(lambda _: self._asked.pop(key))
        return await asyncio.shield(self._asked[key])

    def _request(self, sample: Sample) -> bytes:
        judge = self._config
        content = question(judge.rubric, sample)
        return msgspec.json.encode(
            {
                "model": judge.model,
                "messages": [{"role": "user", "content": content.encode("utf-8", "replace").decode()}],
                "max_tokens": judge.max_tokens,
                "temperature": judge.temperature,
                **judge.request,
            },
            order="deterministic",
        )

    async def _answered(self, key: bytes, body: bytes) -> Outcome:
        kept = None if self._cache is None else await self._cache.get(key)
        if kept is not None and isinstance(found := verdict(kept, self._config), Scored):
            return self._noted(found, cached=True)
        answer = await self._ask(body)
        if isinstance(answer, Failure):
            return answer
        outcome = verdict(answer, self._config)
        if isinstance(outcome, Failure):
            return outcome
        if self._cache is not None:
            await self._cache.put(key, answer)
        return self._noted(outcome, cached=False)

    async def _ask(self, body: bytes) -> str | Failure:
        answer = await self._service.post(body)
        if isinstance(answer, Failure):
            return answer
        try:
            choices = msgspec.json.decode(answer, type=_Answer).choices
        except UNREADABLE as error:
            return Failure(kind="no_number", message=f"answered with something that is not a chat completion: {error}")
        text = choices[0].message.content if choices else None
        return text or Failure(kind="no_number", message="answered with a chat completion without text")

    def _noted(self, outcome: Scored, *, cached: bool) -> Scored:
        if self._cache is None:
            return outcome
        return msgspec.structs.replace(outcome, numbers={**outcome.numbers, CACHED: float(cached)})
