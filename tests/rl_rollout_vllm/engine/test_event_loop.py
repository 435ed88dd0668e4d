"""The thread of an engine's loop, also while a call blocks the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rl_protocol.errors import RolloutError
from rl_rollout_vllm.engine import event_loop
from rl_rollout_vllm.engine.event_loop import LoopThread


def test_the_end_of_a_loop_that_a_late_call_blocks_hides_no_error_and_comes_after_the_call(monkeypatch):
    monkeypatch.setattr(event_loop, "_CLOSE_TIMEOUT_S", 0.1)
    late, loop = threading.Event(), LoopThread()

    async def start() -> None:
        late.wait(60)

    with pytest.raises(RolloutError, match=r"did not answer within 0\.1 s"):  # noqa: PT012 - as the engine does
        try:
            loop.run(start(), 0.1)
        except RolloutError:
            loop.close()
            raise
    assert loop._thread.is_alive()
    late.set()
    loop._thread.join(60)
    assert not loop._thread.is_alive()
    monkeypatch.undo()
    loop.close()


def test_a_closed_loop_runs_nothing_and_says_so():
    loop = LoopThread()
    loop.close()
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)

    with pytest.raises(RolloutError, match="The vLLM engine is closed; start a new one"):
        loop.run(work(), 60)
    with pytest.raises(RolloutError, match="The vLLM engine is closed; start a new one"):
        asyncio.run(loop.call(work()))
    assert not begun
