"""Sleep and wake over a fake client: aborts, admission, and the order of the calls."""

from __future__ import annotations

import asyncio

import pytest

from rl_protocol import ConfigError, RolloutError
from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_rollout_vllm import EngineDiedError

LONG = SamplingParams(max_new_tokens=50, ignore_eos=True)
DEADLINE_S = 60.0


def request(uid="p"):
    return GenerationRequest(uid=uid, session=0, prompt_ids=(2, 3))


async def started(client, count):
    """Wait until this number of requests has started."""
    async with asyncio.timeout(DEADLINE_S):
        # the fake sends no events
        while len(client.seen) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def waits(engine, client):
    """Start a request, check that admission holds it back from vLLM, and return its task."""
    known = len(client.seen)
    asked = asyncio.create_task(engine.generate([request("late")], LONG))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not asked.done()
    assert len(client.seen) == known
    return asked


def test_level_1_aborts_what_runs_and_continues_with_the_same_weights(opened):
    engine, client = opened()
    client.stop_after = 5

    async def scenario():
        running = asyncio.create_task(engine.generate([request()], LONG))
        await started(client, 1)
        assert await engine.sleep() == 4096
        client.stop_after = None
        late = await waits(engine, client)
        await engine.wake("weights")
        assert not late.done()
        await engine.wake("kv_cache")
        return await running, await late

    (cut,), (made,) = asyncio.run(scenario())
    assert cut.finish_reason == "abort"
    assert (made.finish_reason, made.weight_version) == ("length", 0)
    assert client.log == ["pause abort", "rollout_forget_buckets", "sleep 1", "wake weights", "wake kv_cache", "resume"]


@pytest.mark.parametrize("load_between", [True, False])
def test_after_level_2_nothing_is_generated_before_weights_are_loaded(opened, other_weights, load_between):
    """Pitfall: after level 2 the weights are undefined, and vLLM would generate with them."""
    engine, client = opened()

    async def scenario():
        await engine.sleep(2)
        late = await waits(engine, client)
        await engine.wake("weights")
        if load_between:
            await asyncio.to_thread(engine.load_weights, other_weights, 7)
        assert not late.done()
        await engine.wake()
        if not load_between:
            await waits(engine, client)
            await asyncio.to_thread(engine.load_weights, other_weights, 7)
        return await late

    (made,) = asyncio.run(scenario())
    assert made.weight_version == 7
    assert client.log[-1] == "resume"
    assert client.log.count("resume") == 1
    woken = client.log.index("wake kv_cache")
    assert (client.log.index("rollout_finish_update") < woken) == load_between


def test_what_would_go_wrong_is_refused_and_changes_nothing(opened, other_weights):
    engine, client = opened()
    client.sleep_levels = (1,)
    with pytest.raises(
        ConfigError, match=r"can't sleep at level 2; levels that give memory back here: \[1\]\. On GPUs set"
    ):
        asyncio.run(engine.sleep(2))
    assert client.log == []
    asyncio.run(engine.sleep())
    with pytest.raises(RolloutError, match="sleeps already"):
        asyncio.run(engine.sleep())
    with pytest.raises(RolloutError, match=r"call wake\('weights'\) before"):
        engine.load_weights(other_weights, 1)
    with pytest.raises(RolloutError, match="Wake the weights"):
        asyncio.run(engine.wake("kv_cache"))
    asyncio.run(engine.wake())
    asyncio.run(engine.wake())  # already awake
    (made,) = asyncio.run(engine.generate([request()], LONG))
    assert made.weight_version == 0


def test_memory_of_buckets_is_given_up_with_the_rest(opened, other_weights, memory_of_buckets):
    engine, _ = opened()
    engine.load_weights(other_weights, 1)
    assert memory_of_buckets() == 2
    asyncio.run(engine.sleep())
    assert memory_of_buckets() == 0
    asyncio.run(engine.wake())
    engine.load_weights(other_weights, 2)
    assert asyncio.run(engine.generate([request()], LONG))[0].weight_version == 2


def test_a_pause_outlives_a_sleep(opened):
    engine, client = opened()
    asyncio.run(engine.pause())
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake())
    assert "resume" not in client.log
    asyncio.run(engine.resume())
    assert client.log[-1] == "resume"
    asyncio.run(engine.generate([request()], LONG))


@pytest.mark.parametrize("change", ["pause", "sleep"])
def test_requests_do_not_wait_for_an_engine_that_died_of_a_change(opened, change):
    engine, client = opened(call_timeout_s=600.0)
    client.dead = True

    async def scenario():
        with pytest.raises(EngineDiedError):
            await getattr(engine, change)()
        async with asyncio.timeout(DEADLINE_S):
            await engine.generate([request()], LONG)

    with pytest.raises(EngineDiedError):
        asyncio.run(scenario())
