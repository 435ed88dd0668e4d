"""JSON over HTTP to a service that scores, with a rate limit and retries.

Status 200 is an answer. Status 429, 5xx and broken connections are retried, after a delay that
doubles and is at least Retry-After; any other status is final. No message contains the key, the
address or text from the service.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping

import aiohttp

from rl_protocol import ConfigError
from rl_protocol.counted import counted
from rl_trainer.rewards.functions import timed_out
from rl_trainer.rewards.scorer import Failure
from rl_trainer.rewards.scorer_toml import ServiceConfig

MOST_BYTES = 1 << 20
"""Largest answer that the service may send."""
FIRST_WAIT_S = 0.25
"""Delay between the first and the second attempt; doubles each time."""


class RateLimiter:
    """Spaces requests evenly, one every 1/per_s seconds; 0: no limit."""

    def __init__(self, per_s: float) -> None:
        self._gap = 1 / per_s if per_s else 0.0
        self._next = 0.0

    def wait(self, now: float) -> float:
        """Reserve the next start time and return the seconds until then."""
        begin = max(now, self._next)
        self._next = begin + self._gap
        return begin - now


def retry_delay(attempt: int, retry_after: str) -> float:
    """Seconds to wait after attempt number `attempt` (from 1), given the header Retry-After."""
    requested = float(retry_after) if retry_after.isdecimal() else 0.0
    return max(FIRST_WAIT_S * 2 ** (attempt - 1), requested)


class _Retry(Exception):
    """This attempt failed in a way that may not recur."""

    def __init__(self, why: str, retry_after: str = "") -> None:
        super().__init__(why)
        self.retry_after = retry_after


class HttpService:
    """Sends POST requests to one address.

    Args:
        config: address, limits, retries, and the name of the key.
        timeout_s: time limit of a request from its first attempt to its answer, not counting the
            wait for a slot; where `config` has none.
        parameter: what sets `timeout_s`, for messages.
        path: what follows the address of `config`.
        environment: contains the key.
        clock: seconds, for the rate limit.

    Raises:
        ConfigError: the key is not in the environment.
    """

    def __init__(
        self,
        config: ServiceConfig,
        timeout_s: float,
        parameter: str,
        *,
        path: str = "",
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if config.key_variable:
            key = environment.get(config.key_variable, "")
            if not key.isascii() or not key.isprintable() or not key:
                raise ConfigError(
                    f"The environment variable {config.key_variable} (key_variable) contains no key; set it on the host of the reward worker."
                )
            headers["Authorization"] = f"Bearer {key}"
        self._url = f"{config.url.rstrip('/')}{path}" if path else config.url
        self._config = config
        own = config.timeout_s > 0
        self._timeout_s, self._set_by = (config.timeout_s, "timeout_s of its file") if own else (timeout_s, parameter)
        self._headers = headers
        self._rate = RateLimiter(config.requests_per_s)
        self._clock = clock
        self._slots = asyncio.Semaphore(config.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: bytes) -> bytes | Failure:
        """Send a request when a slot is free; returns the body of the answer, or why there is
        none.
        """
        async with self._slots:
            await asyncio.sleep(self._rate.wait(self._clock()))
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._attempts(body)
            except TimeoutError:
                return timed_out(self._timeout_s, self._set_by)

    async def close(self) -> None:
        """Close all connections; safe to call twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _attempts(self, body: bytes) -> bytes | Failure:
        attempt = 1
        while True:
            try:
                return await self._attempt(body)
            except _Retry as failed:
                if attempt == self._config.attempts:
                    return Failure(
                        kind="exception", message=f"got no answer in {counted(attempt, 'attempt')}: {failed}"
                    )
                delay = retry_delay(attempt, failed.retry_after)
            await asyncio.sleep(delay)
            await asyncio.sleep(self._rate.wait(self._clock()))
            attempt += 1

    async def _attempt(self, body: bytes) -> bytes | Failure:
        try:
            async with self._connected().post(self._url, data=body, allow_redirects=False) as response:
                status = response.status
                if status == 429 or status >= 500:
                    raise _Retry(f"status {status}", response.headers.get("Retry-After", ""))
                if status != 200:
                    return Failure(kind="exception", message=f"was refused with status {status}")
                answer = await _read(response.content)
        except (aiohttp.ClientError, ConnectionError) as error:  # its text may contain the address
            raise _Retry(f"the connection failed ({type(error).__name__})") from None
        if answer is None:
            return Failure(kind="no_number", message=f"answered with more than {MOST_BYTES} bytes")
        return answer

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:  # needs a running event loop
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=self._config.concurrency),
                timeout=aiohttp.ClientTimeout(total=None),  # the timeout covers all attempts
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


async def _read(content: aiohttp.StreamReader) -> bytes | None:
    """The whole body; None if it is too long."""
    body = bytearray()
    async for chunk in content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > MOST_BYTES:
            return None
    return bytes(body)
