"""The engine over a fake client: the port's suite, aborts, updates, failures, adapters."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing, contextmanager

import numpy as np
import pytest
from relative import apart

from rl_protocol import ConfigError, RolloutError, WeightSyncError, WeightTensor
from rl_protocol.ports import GenerationRequest, RolloutEngine, SamplingParams
from rl_protocol.testing.bigram_model import initial_table
from rl_protocol.testing.rollout_suite import RolloutEngineSuite
from rl_rollout_vllm import (
    AdapterConfig,
    EngineDiedError,
    TornWeightsError,
    VLLMConfig,
    VLLMRolloutEngine,
    continued,
    request_seed,
)

LONG = SamplingParams(max_new_tokens=50, ignore_eos=True)


def request(uid="p", session=0, prompt=(2, 3)):
    return GenerationRequest(uid=uid, session=session, prompt_ids=tuple(prompt))


def generate(engine, requests, **params):
    return asyncio.run(engine.generate(requests, SamplingParams(**{"max_new_tokens": 6, **params})))


class TestVLLMEngineOverATable(RolloutEngineSuite):
    @pytest.fixture(autouse=True)
    def _engine(self, opened, other_weights):
        self.opened, self.weights = opened, other_weights

    @contextmanager
    def open_engine(self):
        yield self.opened()[0], self.weights


def test_it_is_a_rollout_engine(opened):
    assert isinstance(opened()[0], RolloutEngine)


# -- stop strings
def test_stop_strings_need_a_tokenizer_and_no_continuation(opened):
    params = SamplingParams(max_new_tokens=6, stop=("a",))
    engine, _ = opened()
    with pytest.raises(ConfigError, match=r"need an engine with VLLMConfig\.tokenizer=True"):
        asyncio.run(engine.generate([request()], params))
    engine, client = opened(tokenizer=True)
    asyncio.run(engine.generate([request()], params))
    assert client.seen[0][1]["stop"] == ["a"]
    with pytest.raises(ConfigError, match="on_update='continue' can't be used with stop strings"):
        asyncio.run(engine.ranges([request()], params, on_update="continue"))


# -- admission and aborts
async def started(client, count):
    """Wait until this number of requests has started."""
    async with asyncio.timeout(60):
        while len(client.seen) < count:  # noqa: ASYNC110 - the fake sends no events
            await asyncio.sleep(0.001)


def test_an_update_aborts_what_runs_and_what_comes_later_has_the_new_version(opened, other_weights):
    engine, client = opened()
    client.stop_after = 5

    async def scenario():
        running = asyncio.create_task(engine.generate([request(str(i)) for i in range(8)], LONG))
        await started(client, 8)
        await asyncio.to_thread(engine.load_weights, other_weights, 1)
        client.stop_after = None
        return await running, await engine.generate([request("later")], LONG)

    aborted, (later,) = asyncio.run(scenario())
    assert {g.weight_version for g in aborted} == {0}
    assert {g.finish_reason for g in aborted} == {"abort"}
    assert all(len(g.response_ids) <= 5 for g in aborted)
    assert (later.weight_version, later.finish_reason, len(later.response_ids)) == (1, "length", 50)


def test_nothing_is_admitted_while_paused(opened):
    engine, client = opened()

    async def scenario():
        await engine.pause()
        waiting = asyncio.create_task(engine.generate([request()], LONG))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert not client.seen  # admission holds it back from vLLM
        await engine.resume()
        return await waiting

    (made,) = asyncio.run(scenario())
    assert made.finish_reason == "length"


def test_a_pause_that_keeps_requests_lets_them_finish(opened):
    engine, client = opened()
    client.stop_after = 5

    async def scenario():
        running = asyncio.create_task(engine.generate([request()], LONG))
        await started(client, 1)
        await engine.pause("keep")
        client.stop_after = None
        await asyncio.sleep(0.05)
        assert not running.done()
        await engine.resume()
        return await running

    (made,) = asyncio.run(scenario())
    assert (made.finish_reason, len(made.response_ids)) == ("length", 50)


def test_a_request_that_is_never_admitted_says_why(opened):
    engine, _ = opened(call_timeout_s=0.2)

    async def scenario():
        await engine.pause()
        await engine.generate([request()], LONG)

    with pytest.raises(RolloutError, match=r"No request was admitted for 0\.2 s: the engine is paused, call resume"):
        asyncio.run(scenario())
    asyncio.run(engine.resume())


def test_an_update_while_paused_does_not_admit_requests(opened, other_weights):
    engine, client = opened()
    asyncio.run(engine.pause())
    engine.load_weights(other_weights, 3)
    assert client.paused
    asyncio.run(engine.resume())
    assert not client.paused
    assert generate(engine, [request()])[0].weight_version == 3


def test_abort_returns_what_there_is_and_the_rest_can_be_asked_for_within_the_budget(opened):
    engine, client = opened()
    client.stop_after = 5

    async def scenario():
        running = asyncio.create_task(engine.generate([request()], LONG))
        await started(client, 1)
        await engine.abort()
        client.stop_after = None
        return await running

    (part,) = asyncio.run(scenario())
    assert part.finish_reason == "abort"
    rest = continued(request(), LONG, part.response_ids)
    assert rest is not None
    assert rest[0].prompt_ids == (2, 3, *part.response_ids)
    assert len(part.response_ids) + rest[1].max_new_tokens == 50
    (end,) = asyncio.run(engine.generate([rest[0]], rest[1]))
    assert len(part.response_ids) + len(end.response_ids) == 50
    assert client.seen[1][1]["seed"] != client.seen[0][1]["seed"]  # the rest has another seed
    assert continued(request(), SamplingParams(max_new_tokens=3), (4, 5, 6)) is None


def test_abort_also_ends_a_request_that_is_on_its_way_to_vllm(opened, monkeypatch):
    """vLLM ignores the abort of a request that it does not have yet."""
    engine, client = opened()
    client.stop_after = 5
    known, generate, abort = set[str](), client.generate, client.abort
    aborted_once = asyncio.Event()

    async def late(request_id, *arguments, **options):
        await aborted_once.wait()
        known.add(request_id)
        async for chunk in generate(request_id, *arguments, **options):
            yield chunk

    async def abort_known(ids):
        await abort(known & set(ids))
        if ids:
            aborted_once.set()

    monkeypatch.setattr(client, "generate", late)
    monkeypatch.setattr(client, "abort", abort_known)

    async def scenario():
        running = asyncio.create_task(engine.generate([request()], LONG))
        while not engine._requests.running:  # noqa: ASYNC110 - on the loop of another thread
            await asyncio.sleep(0.001)
        await engine.abort()
        async with asyncio.timeout(60):
            return await running

    (made,) = asyncio.run(scenario())
    assert made.finish_reason == "abort"


def test_abort_does_not_wait_for_the_reader_of_a_stream(opened):
    engine, client = opened()
    client.stop_after = 5

    async def scenario():
        async with aclosing(engine.stream(request(), LONG)) as stream:
            made = [await anext(stream)]
            await engine.abort()
            return made + [one async for one in stream]

    ranges = asyncio.run(scenario())
    assert ranges[-1].finish_reason == "abort"
    assert sum(len(one.token_ids) for one in ranges) <= 5


def test_an_abort_that_vllm_does_not_carry_out_says_so(opened, monkeypatch):
    engine, client = opened(call_timeout_s=0.2)
    client.stop_after = 5
    abort = client.abort

    async def lost(ids):
        pass

    monkeypatch.setattr(client, "abort", lost)

    async def scenario():
        running = asyncio.create_task(engine.generate([request()], LONG))
        await started(client, 1)
        with pytest.raises(RolloutError, match=r"vLLM did not end 1 request within 0\.2 s \(call_timeout_s\)"):
            await engine.abort()
        monkeypatch.setattr(client, "abort", abort)
        await engine.abort()
        return await running

    (made,) = asyncio.run(scenario())
    assert made.finish_reason == "abort"


def test_a_stream_yields_every_token_once_with_its_version(opened):
    engine, _ = opened()

    async def scenario():
        return [made async for made in engine.stream(request(), LONG)]

    ranges = asyncio.run(scenario())
    (whole,) = asyncio.run(engine.generate([request()], LONG))
    assert len(ranges) == 50
    assert tuple(t for r in ranges for t in r.token_ids) == whole.response_ids
    assert tuple(p for r in ranges for p in r.log_probs) == whole.log_probs
    assert {r.weight_version for r in ranges} == {0}
    assert [r.finish_reason for r in ranges] == [None] * 49 + ["length"]


def test_a_stream_that_is_given_up_ends_its_request(opened):
    engine, client = opened()
    client.stop_after = 5

    async def scenario():
        async with aclosing(engine.stream(request(), LONG)) as stream:
            assert (await anext(stream)).weight_version == 0
            assert len(engine._requests.running) == 1

    asyncio.run(scenario())
    assert not engine._requests.running


def test_a_storm_of_updates_loses_no_request(opened):
    """64 requests continue after each of 10 updates; each part has one version."""
    engine, client = opened()
    client.stop_after = 4  # of 50 tokens, so that no request ends before the last update
    tables = [initial_table(i) for i in range(11)]

    async def whole(number):
        asked, params, parts = request(str(number)), LONG, []
        while True:
            (part,) = await engine.generate([asked], params)
            parts.append((asked.prompt_ids[-1], part))
            rest = continued(asked, params, part.response_ids)
            if part.finish_reason != "abort" or rest is None:
                return parts
            asked, params = rest

    async def scenario():
        running = [asyncio.create_task(whole(i)) for i in range(64)]
        await started(client, 64)
        for version in range(1, 11):
            await asyncio.to_thread(engine.load_weights, halves_of(tables[version]), version)
            await started(client, 64 * (version + 1))
        client.stop_after = None
        return await asyncio.gather(*running)

    everything = asyncio.run(scenario())
    assert client.half_tokens == 0
    for parts in everything:
        assert sum(len(part.response_ids) for _, part in parts) == 50
        for last, part in parts:
            before = [last, *part.response_ids[:-1]]
            made_by = tables[part.weight_version]
            rows = made_by - np.log(np.exp(made_by).sum(-1, keepdims=True))
            if part.response_ids:
                assert (
                    apart(part.log_probs, rows[before[: len(part.response_ids)], list(part.response_ids)], rows) < 1e-5
                )
            else:
                assert not part.log_probs
        assert [part.weight_version for _, part in parts] == list(range(11))


# -- responses that outlive an update
def drawn(table, prompt, seed, count):
    """Return the tokens and log-probs that the fake draws after a prompt with this seed."""
    rng, ids, log_probs = np.random.default_rng(seed), [*prompt], []
    for _ in range(count):
        row = table[ids[-1]].astype(np.float64)
        row -= np.log(np.exp(row).sum())
        share = np.cumsum(np.exp(row))
        ids.append(int(np.searchsorted(share, rng.random() * share[-1], side="right")))
        log_probs.append(row[ids[-1]])
    return ids[len(prompt) :], log_probs


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_is_continued_by_the_new_weights_and_every_token_has_its_version(opened, streamed):
    """5 tokens of each version, then the rest; each part is drawn with the seed of its position."""
    engine, client = opened()
    client.stop_after = 5
    tables = [initial_table(i) for i in range(3)]

    async def asked():
        if streamed:
            return [made async for made in engine.stream(request(), LONG, on_update="continue")]
        (ranges,) = await engine.ranges([request()], LONG, on_update="continue")
        return ranges

    async def scenario():
        running = asyncio.create_task(asked())
        for version in (1, 2):
            await started(client, version)
            async with asyncio.timeout(60):
                while client.stood_still < version:  # noqa: ASYNC110 - the fake sends no events
                    await asyncio.sleep(0.001)
            await asyncio.to_thread(engine.load_weights, halves_of(tables[version]), version)
        await started(client, 3)
        client.stop_after = None
        return await running

    ranges = asyncio.run(scenario())
    versions = [r.weight_version for r in ranges for _ in r.token_ids]
    assert versions == [0] * 5 + [1] * 5 + [2] * 40
    if not streamed:
        assert [len(r.token_ids) for r in ranges] == [5, 5, 40]
    assert [r.finish_reason for r in ranges] == [None] * (len(ranges) - 1) + ["length"]
    prompt, log_probs = [2, 3], []
    for table, count in zip(tables, (5, 5, 40), strict=True):
        ids, of_them = drawn(table, prompt, request_seed(0, "p", 0, len(prompt)), count)
        prompt, log_probs = prompt + ids, log_probs + of_them
    assert [t for r in ranges for t in r.token_ids] == prompt[2:]
    assert apart([p for r in ranges for p in r.log_probs], log_probs) < 1e-5


@pytest.mark.parametrize("policy", ["abort", "continue"])
def test_a_storm_of_updates_by_policy(opened, policy):
    """With "abort" one range each; with "continue" complete responses with increasing versions."""
    engine, client = opened()
    client.stop_after = 4

    async def scenario():
        running = asyncio.create_task(engine.ranges([request(str(i)) for i in range(64)], LONG, on_update=policy))
        for version in range(1, 6):
            await started(client, 64 * (version if policy == "continue" else 1))
            await asyncio.to_thread(engine.load_weights, halves_of(initial_table(version)), version)
        await started(client, 64 * (6 if policy == "continue" else 1))
        client.stop_after = None
        return await running

    everything = asyncio.run(scenario())
    assert client.half_tokens == 0
    if policy == "abort":
        assert {(len(ranges), ranges[0].weight_version, ranges[0].finish_reason) for ranges in everything} == {
            (1, 0, "abort")
        }
        return
    for ranges in everything:
        versions = [r.weight_version for r in ranges]
        assert versions == sorted(set(versions))
        assert sum(len(r.token_ids) for r in ranges) == 50
        assert (versions[-1], ranges[-1].finish_reason) == (5, "length")


@pytest.mark.parametrize("ending", ["abort", "pause", "sleep"])
def test_abort_pause_and_sleep_end_a_response_that_updates_do_not(opened, other_weights, ending):
    """`abort`, `pause` and `sleep` also end a response that waits between two of its ranges."""
    engine, client = opened()
    client.stop_after = 5

    async def scenario(between):
        running = asyncio.create_task(engine.ranges([request()], LONG, on_update="continue"))
        await started(client, 1)
        if between:  # paused during the update, it waits for admission
            await engine.pause("keep")
            await asyncio.to_thread(engine.load_weights, other_weights, 1)
        await getattr(engine, ending)()
        if not between:  # it ends without a resume
            async with asyncio.timeout(60):
                await running
        await (engine.wake() if ending == "sleep" else engine.resume())
        await engine.resume()
        async with asyncio.timeout(60):
            return await running

    for between in (False, True):
        client.seen.clear()
        (ranges,) = asyncio.run(scenario(between))
        assert len(client.seen) == 1
        assert ranges[-1].finish_reason == "abort"
        assert sum(len(r.token_ids) for r in ranges) <= 5


def test_a_kept_response_continues_with_the_weights_loaded_during_the_pause(opened, other_weights):
    engine, client = opened()
    client.stop_after = 5

    async def scenario():
        running = asyncio.create_task(engine.ranges([request()], LONG, on_update="continue"))
        await started(client, 1)
        await engine.pause("keep")
        await asyncio.to_thread(engine.load_weights, other_weights, 1)
        await asyncio.sleep(0.05)
        assert len(client.seen) == 1  # the pause still holds
        client.stop_after = None
        await engine.resume()
        return await running

    (ranges,) = asyncio.run(scenario())
    assert (sum(len(r.token_ids) for r in ranges), ranges[-1].weight_version) == (50, 1)


def test_an_update_that_breaks_off_is_the_end_of_the_responses_it_cut_short(opened, other_weights):
    engine, client = opened()
    client.fail_at, client.stop_after = 4, 5

    async def scenario():
        running = asyncio.create_task(engine.ranges([request()], LONG, on_update="continue"))
        await started(client, 1)
        with pytest.raises(TornWeightsError):
            await asyncio.to_thread(engine.load_weights, other_weights, 1)
        async with asyncio.timeout(60):
            await running

    with pytest.raises(TornWeightsError, match="version 1 broke off"):
        asyncio.run(scenario())


def halves_of(table):
    return [
        WeightTensor(name, "float32", (4, 8), part.copy().reshape(-1).view(np.uint8))
        for name, part in zip(("table.low", "table.high"), np.split(table, 2), strict=True)
    ]


# -- updates
def test_an_update_goes_bucket_by_bucket_and_empties_the_caches_before_anyone_is_admitted(opened, other_weights):
    engine, client = opened()
    engine.load_weights(other_weights, 1)
    assert client.log == [
        "pause abort",
        "rollout_begin_update",
        "rollout_load_bucket",
        "rollout_load_bucket",
        "rollout_finish_update",
        "reset",
        "resume",
    ]


def test_two_updates_at_once_take_turns(opened, other_weights):
    engine, client = opened()

    async def scenario():
        await asyncio.gather(*(asyncio.to_thread(engine.load_weights, other_weights, v) for v in (1, 2)))

    asyncio.run(scenario())
    assert client.log[:7] == client.log[7:]
    assert len(client.log) == 14


@pytest.mark.parametrize("fail_at", [3, 4, 5, 6])
def test_a_fault_between_buckets_lets_no_token_through(opened, other_weights, fail_at):
    engine, client = opened()
    client.fail_at, client.stop_after = fail_at, 5

    async def scenario():
        running = asyncio.create_task(engine.generate([request("early")], LONG))
        await started(client, 1)
        await engine.pause("keep")
        waiting = asyncio.create_task(engine.generate([request("late")], LONG))
        with pytest.raises(TornWeightsError, match="a worker failed"):
            await asyncio.to_thread(engine.load_weights, other_weights, 1)
        with pytest.raises(TornWeightsError, match="version 1 broke off"):
            await waiting
        return await running

    (early,) = asyncio.run(scenario())
    assert (early.finish_reason, early.weight_version) == ("abort", 0)
    assert engine.weight_version == 0
    asyncio.run(engine.resume())
    with pytest.raises(TornWeightsError, match="version 1 broke off"):
        generate(engine, [request()])
    assert (client.half_tokens, len(client.seen)) == (0, 1)
    client.fail_at = client.stop_after = None
    engine.load_weights(other_weights, 2)
    assert generate(engine, [request()])[0].weight_version == 2


def test_other_bytes_than_were_sent_are_found(opened, other_weights):
    engine, client = opened()
    client.lie = 1
    with pytest.raises(TornWeightsError, match="Worker 0 of the vLLM engine read other bytes than were sent"):
        engine.load_weights(other_weights, 1)


@pytest.mark.parametrize("keeps", [False, True])
def test_updates_use_the_memory_of_the_last_ones_again(opened, other_weights, keeps, memory_of_buckets):
    engine, client = opened()
    client.keeps = keeps
    for version in range(1, 5):
        engine.load_weights(other_weights, version)
    assert memory_of_buckets() == 2 + keeps
    engine.close()
    assert memory_of_buckets() == 0


def test_weights_that_do_not_fit_touch_nothing(opened, other_weights):
    engine, client = opened()
    with pytest.raises(WeightSyncError, match="name a tensor twice"):
        engine.load_weights([*other_weights, other_weights[0]], 1)
    with pytest.raises(WeightSyncError, match=r"missing \['table.high'\]"):
        engine.load_weights(other_weights[:1], 1)
    assert client.log == []


# -- failures
def test_a_dead_engine_raises_its_error(opened, other_weights):
    engine, client = opened(call_timeout_s=600.0)
    client.stop_after = 5

    async def scenario():
        running = asyncio.create_task(engine.generate([request()], LONG))
        await started(client, 1)
        client.dead = True
        await running

    with pytest.raises(EngineDiedError):
        asyncio.run(scenario())
    with pytest.raises(EngineDiedError):
        engine.load_weights(other_weights, 1)
    start = time.monotonic()
    with pytest.raises(EngineDiedError):
        generate(engine, [request()])
    assert time.monotonic() - start < 60  # immediately, not at a deadline


def test_requests_that_cannot_be_served_are_named(opened):
    engine, client = opened(max_model_len=16)
    for prompt, message in (
        ((), r"'p', session 0: the prompt has no tokens"),
        ((2,) * 11, r"'p', session 0.*11 tokens.*SamplingParams\.max_new_tokens=6.*17.*16 \(max_model_len\)"),
        ((2, 8), r"'p', session 0: token ids must lie in 0\.\.7; got 2 to 8"),
    ):
        with pytest.raises(RolloutError, match=message):
            generate(engine, [request("fine"), request(prompt=prompt)])
    assert client.seen == []


def test_log_probs_the_engine_does_not_report_are_refused(opened):
    raw, _ = opened(logprobs_mode="raw_logprobs")
    processed, _ = opened()
    with pytest.raises(ConfigError, match="need an engine with logprobs_mode='processed_logprobs'"):
        generate(raw, [request()], temperature=0.5)
    with pytest.raises(ConfigError, match="need an engine with logprobs_mode='raw_logprobs'"):
        generate(processed, [request()], top_k=3)
    for engine in (raw, processed):
        assert generate(engine, [request()]) == generate(engine, [request()])
    few, client = opened(max_logprobs=3)
    with pytest.raises(ConfigError, match=r"top_k=4 .*VLLMConfig\.max_logprobs of at least that; this one has 3"):
        generate(few, [request()], top_k=4, kept_sets=True)
    assert client.seen == []


def test_parameters_that_vllm_does_not_serve_are_refused(opened):
    engine, client = opened()
    for ids in ((8,), (3, -1)):
        with pytest.raises(ConfigError, match=rf"stop_token_ids must lie in 0\.\.7, .* got \[{ids[-1]}\]"):
            generate(engine, [request()], stop_token_ids=ids)
    with pytest.raises(ConfigError, match="set routed_experts to False"):
        generate(engine, [request()], routed_experts=True)
    assert client.seen == []


def test_folders_and_settings_that_do_not_fit(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json can't be read.*Hugging Face folder"):
        VLLMRolloutEngine(VLLMConfig(model_path=str(tmp_path)))
    with pytest.raises(ConfigError, match="max_model_len=65 is more than the context of 64"):
        VLLMRolloutEngine(VLLMConfig(model_path=str(checkpoint), max_model_len=65))
    with pytest.raises(ConfigError, match="kv_cache_bytes must be at least 0; got -1"):
        VLLMConfig(model_path="x", kv_cache_bytes=-1)


def test_a_closed_engine_refuses_every_call(opened, other_weights):
    engine, _ = opened()
    engine.close()

    async def read_stream():
        return [made async for made in engine.stream(request(), LONG)]

    for call in (
        lambda: generate(engine, [request()]),
        lambda: engine.load_weights(other_weights, 1),
        lambda: asyncio.run(engine.sleep(1)),
        lambda: asyncio.run(read_stream()),
    ):
        with pytest.raises(RolloutError, match="The vLLM engine is closed"):
            call()
    assert engine.weight_version == 0


def test_an_engine_that_fails_to_close_leaves_no_thread_and_no_memory(
    opened, other_weights, memory_of_buckets, monkeypatch
):
    engine, client = opened()
    engine.load_weights(other_weights, 1)

    async def fail():
        client.closed = True
        raise RolloutError("vLLM did not shut down")

    monkeypatch.setattr(client, "close", fail)
    before = threading.active_count()
    with pytest.raises(RolloutError, match="did not shut down"):
        engine.close()
    assert threading.active_count() == before - 1
    assert memory_of_buckets() == 0


# -- adapters
ROOM = AdapterConfig(rank=8, alpha=16, target_modules=("q_proj",))


def adapter(rank=2, module="model.layers.0.self_attn.q_proj"):
    return [
        WeightTensor(
            f"base_model.model.{module}.lora_{side}.weight", "float32", shape, np.zeros(4 * 4 * rank, np.uint8)
        )
        for side, shape in (("A", (rank, 4)), ("B", (4, rank)))
    ]


def test_each_adapter_has_its_own_name_and_survives_an_update_of_the_base(opened, other_weights):
    engine, client = opened(adapter=ROOM)
    engine.load_adapter(adapter(), 1)
    assert generate(engine, [request()])[0].weight_version == 1
    engine.load_adapter(adapter(), 2)
    generate(engine, [request()])
    engine.load_weights(other_weights, 3)  # vLLM drops its adapters here
    assert generate(engine, [request()])[0].weight_version == 3
    first, second, third = (seen[2] for seen in client.seen)
    assert (first.name, second.name) == ("policy-v1", "policy-v2")
    assert first.number != second.number
    assert second == third
    assert client.log[-3:] == ["rollout_load_adapter", "reset", "resume"]


@pytest.mark.parametrize("lost_by", ["an update that broke off", "sleep"])
def test_an_adapter_does_not_replace_weights_that_were_lost(opened, other_weights, lost_by):
    engine, client = opened(adapter=ROOM)
    if lost_by == "sleep":
        asyncio.run(engine.sleep(2))
        asyncio.run(engine.wake())
    else:
        client.fail_at = 4
        with pytest.raises(TornWeightsError):
            engine.load_weights(other_weights, 1)
        client.fail_at = None
    calls = len(client.log)
    with pytest.raises(WeightSyncError, match="without the weights of the model"):
        engine.load_adapter(adapter(), 2)
    assert len(client.log) == calls
    engine.load_weights(other_weights, 3)
    engine.load_adapter(adapter(), 4)
    assert generate(engine, [request()])[0].weight_version == 4


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (adapter(rank=9), "has rank 9, the engine has room for 8"),
        (adapter()[:1], r"needs A \[rank, in\] and B"),
        (adapter(module="model.layers.0.mlp.up_proj"), "up_proj.*target_modules"),
        (halves_of(initial_table()), "'table.low' .* is not part of a LoRA adapter"),
        ([], "holds no tensors"),
    ],
)
def test_adapters_that_do_not_fit_touch_nothing(opened, tensors, message):
    engine, client = opened(adapter=ROOM)
    with pytest.raises(WeightSyncError, match=message):
        engine.load_adapter(tensors, 1)
    assert (client.log, engine.weight_version) == ([], 0)


def test_an_engine_without_room_says_so(opened):
    with pytest.raises(WeightSyncError, match=r"without room for adapters; set VLLMConfig\.adapter"):
        opened()[0].load_adapter(adapter(), 1)
