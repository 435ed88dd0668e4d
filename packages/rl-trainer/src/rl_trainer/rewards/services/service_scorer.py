"""ServiceScorer: base class of scorers that ask a service once for each sample."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

from rl_trainer.rewards.scorer import Outcome, Sample
from rl_trainer.rewards.scorer_toml import ServiceConfig
from rl_trainer.rewards.services.http_service import HttpService

C = TypeVar("C", bound=ServiceConfig)


class ServiceScorer(ABC, Generic[C]):
    """Scores all samples of a call at once; a sample without an answer is a Failure.

    Args:
        config: address, limits, retries, and what the subclass needs.
        timeout_s: time limit of a sample from its first attempt to its answer, not counting the
            wait for a slot; where `config` has none.
        environment: contains the key.
        clock: seconds, for the rate limit.

    Raises:
        ConfigError: the key is not in the environment.
    """

    PATH: ClassVar[str] = ""
    """What follows the address of the service."""
    reads_tokens: bool = False
    compares: bool = False

    def __init__(
        self,
        config: C,
        timeout_s: float,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        parameter = f"{type(self).__name__}.timeout_s"
        self._service = HttpService(config, timeout_s, parameter, path=self.PATH, environment=environment, clock=clock)

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        return list(await asyncio.gather(*map(self._one, samples)))

    async def close(self) -> None:
        """Close all connections; safe to call twice."""
        await self._service.close()

    @abstractmethod
    async def _one(self, sample: Sample) -> Outcome:
        """Score one sample."""
