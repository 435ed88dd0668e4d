"""A scorer behind a network: one HTTP POST per sample, at a bounded rate, tried again where that may help (extra `http`).

    request   {"data_source": .., "solution_str": .., "ground_truth": .., "extra_info": {..}}       JSON, the arguments of a reward function
    answer    0.5, or {"score": 0.5, "acc": 1, "pred": "42", ..}                                    JSON, what a reward function returns

Status 200 is an answer. 429, 5xx and a connection that breaks are tried again, after a while that doubles and is at least what Retry-After says;
anything else is final. A sample that gets no answer is a Failure of its own. No message holds the key, the address or what the service said.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence

import aiohttp
import msgspec

from rl_protocol import ConfigError
from rl_protocol.errors import UNREADABLE
from rl_trainer.rewards.described import Remote
from rl_trainer.rewards.functions import timed_out
from rl_trainer.rewards.outcomes import Failure, Outcome, Sample, outcome_of

MOST_BYTES = 1 << 20
"""No honest answer is longer."""
FIRST_WAIT_S = 0.25
"""Between the first attempt and the second; doubled each time."""
_Answer = dict[str, float | str | bool | None] | float | None


class Pace:
    """When requests may begin, so that no more than `per_s` do in a second: evenly, one every 1/per_s s. 0: at once."""

    def __init__(self, per_s: float) -> None:
        self._gap = 1 / per_s if per_s else 0.0
        self._next = 0.0

    def wait(self, now: float) -> float:
        """Take the next place; seconds until it comes."""
        begin = max(now, self._next)
        self._next = begin + self._gap
        return begin - now


def wait_again(attempt: int, retry_after: str) -> float:
    """Seconds before attempt number `attempt` + 1 (from 1), given the header Retry-After."""
    asked = float(retry_after) if retry_after.isdecimal() else 0.0
    return max(FIRST_WAIT_S * 2 ** (attempt - 1), asked)


class _Again(Exception):
    """This attempt gave no answer; another may."""

    def __init__(self, why: str, retry_after: str = "") -> None:
        super().__init__(why)
        self.retry_after = retry_after


class RemoteScorer:
    """Scorer over HTTP.

    Args:
        remote: whom to ask, and how often.
        timeout_s: longest time of one sample from its first attempt to its answer; time spent waiting for a turn does not count.
        environment: holds the key.
        clock: seconds, of the pace.

    Raises:
        ConfigError: the key is not in the environment.
    """

    reads_tokens: bool = False

    def __init__(
        self,
        remote: Remote,
        timeout_s: float,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if remote.key_variable:
            key = environment.get(remote.key_variable, "")
            if not key.isascii() or not key.isprintable() or not key:
                raise ConfigError(
                    f"The environment variable {remote.key_variable} (key_variable) holds no key; set it on the host of the reward worker."
                )
            headers["Authorization"] = f"Bearer {key}"
        self._remote = remote
        self._timeout_s = timeout_s
        self._headers = headers
        self._pace = Pace(remote.requests_per_s)
        self._clock = clock
        self._turns = asyncio.Semaphore(remote.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """See Scorer."""
        return list(await asyncio.gather(*map(self._one, samples)))

    async def close(self) -> None:
        """Close all connections; safe to call twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _one(self, sample: Sample) -> Outcome:
        body = msgspec.json.encode(
            {
                "data_source": sample.data_source,
                "solution_str": sample.solution_str,
                "ground_truth": sample.ground_truth,
                "extra_info": sample.extra_info,
            }
        )
        async with self._turns:
            await asyncio.sleep(self._pace.wait(self._clock()))
            limit = asyncio.timeout(self._timeout_s)
            try:
                async with limit:
                    return await self._attempts(body)
            except TimeoutError:
                return timed_out(self._timeout_s)

    async def _attempts(self, body: bytes) -> Outcome:
        attempt = 1
        while True:
            try:
                return await self._attempt(body)
            except _Again as failed:
                if attempt == self._remote.attempts:
                    return Failure(kind="exception", message=f"got no answer in {attempt} attempts: {failed}")
                again = wait_again(attempt, failed.retry_after)
            await asyncio.sleep(again)
            await asyncio.sleep(self._pace.wait(self._clock()))
            attempt += 1

    async def _attempt(self, body: bytes) -> Outcome:
        try:
            async with self._connected().post(self._remote.url, data=body, allow_redirects=False) as response:
                status = response.status
                if status == 429 or status >= 500:
                    raise _Again(f"status {status}", response.headers.get("Retry-After", ""))
                if status != 200:
                    return Failure(kind="exception", message=f"was refused with status {status}")
                answer = await _read(response.content)
        except (aiohttp.ClientError, ConnectionError) as error:  # its text may hold the address
            raise _Again(f"the connection failed ({type(error).__name__})") from None
        if answer is None:
            return Failure(kind="no_number", message=f"answered with more than {MOST_BYTES} bytes")
        try:
            return outcome_of(msgspec.json.decode(answer, type=_Answer))
        except UNREADABLE as error:
            return Failure(kind="no_number", message=f"answered with something that is no score: {error}")

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:  # made where a loop runs
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=self._remote.concurrency),
                timeout=aiohttp.ClientTimeout(total=None),  # ours covers all attempts
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


async def _read(content: aiohttp.StreamReader) -> bytes | None:
    """The whole body; None where it is too long."""
    body = bytearray()
    async for chunk in content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > MOST_BYTES:
            return None
    return bytes(body)
