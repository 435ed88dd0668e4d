"""A coroutine that runs beside a block."""

from __future__ import annotations

import asyncio

import pytest

from rl_app_ppo.driver.background import running


def test_it_runs_while_the_block_does_and_has_ended_after_it() -> None:
    said: list[str] = []

    async def work() -> None:
        said.append("begins")
        try:
            await asyncio.sleep(60)
        finally:
            said.append("ends")

    async def main() -> None:
        async with running(work()):
            await asyncio.sleep(0)
            said.append("block")

    asyncio.run(main())
    assert said == ["begins", "block", "ends"]


def test_its_error_is_raised_at_the_end_of_the_block() -> None:
    async def work() -> None:
        raise ValueError("of the work")

    async def main() -> None:
        async with running(work()):
            await asyncio.sleep(0)

    with pytest.raises(ValueError, match="of the work"):
        asyncio.run(main())
