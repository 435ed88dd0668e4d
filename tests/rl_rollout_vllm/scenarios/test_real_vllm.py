"""vLLM on CPU with tiny models: run with `-m vllm` in its environment (see CONTRIBUTING).

The tests share a few engines, one at a time, because a start takes 15 s or more.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import psutil
import pytest
from abandoned_memory import SHARED_MEMORY, held_by, no_memory_left
from polling import until

from rl_protocol import ConfigError
from rl_protocol.batch.kept_sets import BITMAP
from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_protocol.testing.rollout_suite import RolloutEngineSuite
from rl_rollout_vllm import AdapterConfig, EngineDiedError, VLLMConfig, VLLMRolloutEngine, continued, require_vllm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # for vLLM's own warnings
]

TOLERANCE = 1e-3
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER = AdapterConfig(rank=8, alpha=16, target_modules=LINEAR)
REQUESTS = [
    GenerationRequest(uid=f"p{i}", session=0, prompt_ids=tuple(2 + (7 * i + k) % 11 for k in range(1 + i % 9)))
    for i in range(16)
]


def model(seed, tied=False):
    """Return a Qwen2 of about 60,000 parameters over 14 tokens with weights from `seed`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=14,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config).float().eval()


LETTERS = ("<pad>", "<eos>", *"abcdefghijkl")


def write_tokenizer(folder):
    """Write a tokenizer with a letter per token."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(LETTERS)}, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def weights_of(model, *, without=()):
    from rl_protocol.torch import to_weight

    return [to_weight(name, tensor) for name, tensor in model.state_dict().items() if name not in without]


def difference(model, requests, generations, temperature=1.0):
    """Return the largest difference between log-probs of the engine and of transformers."""
    import torch

    worst = 0.0
    for request, made in zip(requests, generations, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *made.response_ids]])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits[0].float() / temperature, dim=-1)
        start = len(request.prompt_ids) - 1
        for step, (token, log_prob) in enumerate(zip(made.response_ids, made.log_probs, strict=True)):
            worst = max(worst, abs(log_probs[start + step, token].item() - log_prob))
    return worst


def tell(text):
    """Print figures; shown with -s."""
    sys.stderr.write(f"{text}\n")


def generate(engine, requests=REQUESTS, **params):
    return asyncio.run(engine.generate(requests, SamplingParams(**{"max_new_tokens": 24, **params})))


def threads_of_zmq():
    """Return the number of ZeroMQ threads in this process, which Python does not list."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            names.append((task / "comm").read_text())
    return sum(name.startswith("ZMQ") for name in names)


@contextmanager
def slow_end():
    """Give vLLM's client time to read that the engine's process has ended, before it closes."""
    from vllm.v1.engine.utils import CoreEngineProcManager

    end = CoreEngineProcManager.shutdown

    def slowly(*arguments, **options):
        end(*arguments, **options)
        time.sleep(0.5)

    with mock.patch.object(CoreEngineProcManager, "shutdown", slowly):
        yield


@contextmanager
def errors_of_vllm():
    """What vLLM logs as errors in this process meanwhile."""
    found = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("vllm").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("vllm").removeHandler(handler)


@contextmanager
def running(path, **settings):
    """Open an engine; check that closing it frees its resources here without garbage collection,
    and that vLLM logs no error.
    """
    small = {"max_num_seqs": 32, "kv_cache_bytes": 64 << 20, "bucket_bytes": 16 << 10, "call_timeout_s": 120.0}
    before = threads_of_zmq()
    engine = VLLMRolloutEngine(VLLMConfig(model_path=str(path), **{**small, **settings}))
    assert threads_of_zmq() > before
    try:
        yield engine
    finally:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            with slow_end(), errors_of_vllm() as errors:
                engine.close()
            gc.collect()
    assert not errors
    assert not [str(each.message) for each in heard if "Unclosed" in str(each.message)]
    deadline = time.monotonic() + 60
    while threads_of_zmq() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threads_of_zmq() == before


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untied")
    model(0).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def owner(path, tmp_path_factory):
    """A process that starts an engine of two workers and waits."""
    script = tmp_path_factory.mktemp("owner") / "owner.py"
    script.write_text(OWNER)
    with subprocess.Popen([sys.executable, str(script), str(path)], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def orphans(owner):
    """The processes of that engine, just after their owner was killed."""
    # vLLM's own log comes through the same pipe
    assert any(line == "up\n" for line in owner.stdout)
    family = psutil.Process(owner.pid).children(recursive=True)
    owner.kill()
    return family


@pytest.fixture(scope="module")
def engine(path, owner):
    """The engine of most tests. A test may change its weights but must leave it working."""
    with running(path, adapter=ADAPTER, tokenizer=True) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _fresh(request):
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").load_weights(weights_of(model(0)), 0)


def test_what_is_installed_is_what_the_table_knows():
    capabilities = require_vllm()
    assert (capabilities.device, capabilities.sleep_frees_memory) == ("cpu", False)


class TestVLLM(RolloutEngineSuite):
    """The port's suite over one engine; each test starts with the first weights."""

    @staticmethod
    def decode(ids):
        return "".join(LETTERS[token] for token in ids if token > 1)

    @pytest.fixture(autouse=True)
    def _engine(self, engine):
        self.engine = engine

    @contextmanager
    def open_engine(self):
        self.engine.load_weights(weights_of(model(0)), 0)
        yield self.engine, weights_of(model(1))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5, 0.0])
def test_log_probs_are_the_trainers_at_the_same_temperature(engine, temperature):
    """Pitfall: by default vLLM reports log-probs at temperature 1, whatever it samples with."""
    worst = difference(model(0), REQUESTS, generate(engine, temperature=temperature), temperature or 1.0)
    tell(f"temperature {temperature}: max |difference| {worst:.1e}")
    assert worst < TOLERANCE


@pytest.mark.parametrize("truncation", [{"top_k": 5}, {"top_k": 6, "top_p": 0.8, "temperature": 0.7}])
def test_kept_sets_are_those_of_top_k_and_top_p(engine, truncation):
    """Against the rule of both on the probabilities of transformers, in float64."""
    import torch

    reference, temperature = model(0), truncation.get("temperature", 1.0)
    for request, made in zip(REQUESTS, generate(engine, kept_sets=True, **truncation), strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*request.prompt_ids, *made.response_ids]])).logits[0]
        p = torch.softmax(logits.double() / temperature, -1).numpy()[len(request.prompt_ids) - 1 : -1]
        words = made.kept.words.tolist()
        for row, count, token, log_prob in zip(
            p, made.kept.counts.tolist(), made.response_ids, made.log_probs, strict=True
        ):
            ids, words = words[:count], words[count:]
            kept = {bit for bit in range(14) if ids[1] >> bit & 1} if ids[0] == BITMAP else set(ids)
            best = np.argsort(-row)[: truncation["top_k"]]
            needed = int(np.searchsorted(np.cumsum(row[best]) / row[best].sum(), truncation.get("top_p", 1.0))) + 1
            assert kept == set(best[:needed])
            assert log_prob == pytest.approx(np.log(row[token] / row[list(kept)].sum()), abs=TOLERANCE)
        assert not words


def test_twenty_updates_leave_no_drift_and_no_old_prefix(engine):
    """Pitfalls: prepacked weights on CPU; cached prefixes of old weights; reused buckets."""
    prompts = [
        GenerationRequest(uid=f"long{i}", session=0, prompt_ids=tuple(2 + (5 * k + i) % 11 for k in range(300)))
        for i in range(2)
    ]
    worst = 0.0
    for version in range(1, 21):
        newest = model(version)
        engine.load_weights(weights_of(newest), version)
        made = generate(engine, prompts, max_new_tokens=4, ignore_eos=True)
        assert {g.weight_version for g in made} == {version}
        worst = max(worst, difference(newest, prompts, made))
    made = generate(engine)
    worst = max(worst, difference(newest, REQUESTS, made))
    tell(f"after 20 updates: max |difference| {worst:.1e}")
    assert worst < TOLERANCE
    assert difference(model(19), REQUESTS, made) > 0.1  # old weights would exceed the tolerance


def test_the_next_update_repairs_one_that_broke_off_between_buckets(engine, monkeypatch):
    from rl_protocol import RolloutError
    from rl_rollout_vllm import TornWeightsError

    client, calls = engine._client, []
    whole = type(client).call

    async def breaking(self, method, *arguments):
        calls.append(method)
        if calls.count("rollout_load_bucket") == 3:
            raise RolloutError("the third bucket was lost")
        return await whole(self, method, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(type(client), "call", breaking)
        with pytest.raises(TornWeightsError, match="third bucket"):
            engine.load_weights(weights_of(model(5)), 5)
    assert len(calls) > 3
    with pytest.raises(TornWeightsError):
        generate(engine)
    engine.load_weights(weights_of(model(6)), 6)
    assert difference(model(6), REQUESTS, generate(engine)) < TOLERANCE


def test_an_update_aborts_what_runs_and_every_token_is_of_the_version_it_names(engine):
    """64 requests, 10 updates: all responses are complete, and each part matches its version.

    Pitfall: prompts that do not fit into one step are computed in parts, which kills a CPU engine.
    """
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    requests = [GenerationRequest(uid=f"s{i}", session=0, prompt_ids=(2 + i % 11,)) for i in range(64)]

    async def whole(asked):
        parts, limit = [], params
        while True:
            (part,) = await engine.generate([asked], limit)
            parts.append((asked, part))
            rest = continued(asked, limit, part.response_ids)
            if part.finish_reason != "abort" or rest is None:
                return parts
            asked, limit = rest

    async def scenario():
        tasks = [asyncio.create_task(whole(request)) for request in requests]
        for version in range(1, 11):
            await asyncio.sleep(0.2)
            await asyncio.to_thread(engine.load_weights, weights_of(model(version)), version)
        return await asyncio.gather(*tasks)

    memory = psutil.Process(engine_process(engine)).memory_info().rss
    everything = asyncio.run(scenario())
    grown = psutil.Process(engine_process(engine)).memory_info().rss - memory
    assert all(sum(len(part.response_ids) for _, part in parts) == 200 for parts in everything)
    versions = {part.weight_version for parts in everything for _, part in parts if part.response_ids}
    assert len(versions) > 1
    by_version: dict[int, list] = {}
    for parts in everything[::8]:
        for asked, part in parts:
            by_version.setdefault(part.weight_version, []).append((asked, part))
    worst = max(difference(model(v), *zip(*pairs, strict=True)) for v, pairs in by_version.items())
    tell(f"storm: versions {sorted(versions)}, max |difference| {worst:.1e}, engine grew by {grown >> 20} MiB")
    assert worst < TOLERANCE
    assert grown < 256 << 20


def test_a_response_cut_short_continues_with_the_new_weights_on_request(engine):
    """64 responses, 10 updates: each is complete, and each range has its version's log-probs."""
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    requests = [GenerationRequest(uid=f"w{i}", session=0, prompt_ids=(2 + i % 11,)) for i in range(64)]

    async def streamed():
        return [made async for made in engine.stream(requests[0], params, on_update="continue")]

    async def scenario():
        tasks = [asyncio.create_task(engine.ranges(requests[1:], params, on_update="continue"))]
        tasks.append(asyncio.create_task(streamed()))
        for version in range(1, 11):
            await asyncio.sleep(0.1)
            await asyncio.to_thread(engine.load_weights, weights_of(model(version)), version)
        return await asyncio.gather(*tasks)

    whole, one = asyncio.run(scenario())
    worst, cut = 0.0, 0
    for number, (request, ranges) in enumerate(zip(requests, [one, *whole], strict=True)):
        versions = [made.weight_version for made in ranges]
        assert (sum(len(made.token_ids) for made in ranges), versions) == (200, sorted(versions))
        assert [made.finish_reason for made in ranges] == [None] * (len(ranges) - 1) + ["length"]
        cut += len(set(versions)) > 1
        so_far = request.prompt_ids
        for version in sorted(set(versions)) if number % 8 == 0 else ():
            of_it = [made for made in ranges if made.weight_version == version]
            tokens = tuple(token for made in of_it for token in made.token_ids)
            part = GenerationRequest(uid=request.uid, session=0, prompt_ids=so_far)
            log_probs = [value for made in of_it for value in made.log_probs]
            joined = SimpleNamespace(response_ids=tokens, log_probs=log_probs)
            worst = max(worst, difference(model(version), [part], [joined]))
            so_far += tokens
    tell(f"{cut} of 64 responses went on after an update, max |difference| {worst:.1e}")
    assert cut > 32
    assert worst < TOLERANCE


def test_256_requests_in_flight_outlive_50_updates_in_flat_memory(engine):
    """Each of 256 callers requests the rest after an abort, or another response, until the end."""
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    sets = [weights_of(model(seed)) for seed in (1, 2)]
    memory, over = [], asyncio.Event()

    async def client(number):
        versions, whole = [], 0
        while not over.is_set():
            asked, limit, tokens = GenerationRequest(uid=f"c{number}-{whole}", session=0, prompt_ids=(3,)), params, 0
            while tokens < 200:
                (part,) = await engine.generate([asked], limit)
                tokens += len(part.response_ids)
                versions.append(part.weight_version)
                asked, limit = continued(asked, limit, part.response_ids) or (asked, limit)
            assert tokens == 200
            whole += 1
        return versions, whole

    async def scenario():
        tasks = [asyncio.create_task(client(number)) for number in range(256)]
        async with asyncio.timeout(300):
            for version in range(1, 51):
                # the engine sends no events
                while len(engine._requests.running) < 240:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(engine.load_weights, sets[version % 2], version)
                if version % 10 == 0:
                    await engine.sleep()  # excludes the KV cache from the measurement
                    pids = (os.getpid(), engine_process(engine))
                    memory.append([psutil.Process(pid).memory_info().rss >> 20 for pid in pids])
                    await engine.wake()
            over.set()
            return await asyncio.gather(*tasks)

    done = asyncio.run(scenario())
    tell(
        f"256 requests, 50 updates: MiB of client and engine after every tenth {memory}, {sum(whole for _, whole in done)} whole responses"
    )
    assert all(versions == sorted(versions) and versions[-1] == 50 and whole for versions, whole in done)
    ours, vllms = (last - second for last, second in zip(memory[-1], memory[1], strict=True))
    assert ours < 16
    assert vllms < 160  # a known limitation: it keeps some memory for each new batch size
    assert difference(model(1), REQUESTS, generate(engine)) < TOLERANCE  # update 50 sent model(1)


# -- sleep
def test_sleep_gives_the_memory_of_keys_and_values_back_and_the_weights_stay(engine):
    """Pitfall: vLLM's own sleep does nothing on CPU. Only memory in use can be freed."""
    requests = [GenerationRequest(uid=f"s{i}", session=0, prompt_ids=(2 + i % 11,)) for i in range(32)]
    generate(engine, requests, max_new_tokens=400, ignore_eos=True)
    process = psutil.Process(engine_process(engine))
    before = process.memory_info().rss
    said = asyncio.run(engine.sleep())
    freed = before - process.memory_info().rss
    asyncio.run(engine.wake())
    tell(f"sleep gave back {freed / 2**20:.1f} MiB of a KV cache of {said / 2**20:.1f} MiB")
    assert engine._config.kv_cache_bytes * 0.9 < said <= engine._config.kv_cache_bytes
    # 32 * 400 tokens * 2 layers * (K, V) * 32 numbers of 4 bytes are 6.25 MiB
    assert freed > 4 << 20
    assert difference(model(0), REQUESTS, generate(engine)) < TOLERANCE
    with pytest.raises(ConfigError, match=r"can't sleep at level 2; .* \[1\]"):
        asyncio.run(engine.sleep(2))
    assert difference(model(0), REQUESTS, generate(engine)) < TOLERANCE


def test_a_kept_request_continues_after_a_pause(engine):
    request = GenerationRequest(uid="kept", session=0, prompt_ids=(3,))
    params = SamplingParams(max_new_tokens=300, ignore_eos=True)

    async def scenario():
        ranges = []
        async for made in engine.stream(request, params):
            ranges.append(made)
            if len(ranges) == 5:
                await engine.pause("keep")
                await asyncio.sleep(0.1)
                await engine.resume()
        return ranges

    ranges = asyncio.run(scenario())
    assert sum(len(r.token_ids) for r in ranges) == 300
    assert ranges[-1].finish_reason == "length"


# -- adapters
def adapted(seed):
    """Return a PEFT model with a random adapter of rank 8 that changes its output."""
    import peft
    import torch

    base = model(0)
    torch.manual_seed(1000 + seed)
    wrapped = peft.get_peft_model(
        base, peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(LINEAR), task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return wrapped.eval()


def adapter_of(wrapped):
    import peft

    from rl_protocol.torch import to_weight

    return [to_weight(name, tensor) for name, tensor in peft.get_peft_model_state_dict(wrapped).items()]


def adapters_by_step(engine, folder):
    """Return the largest difference to PEFT over three adapters, an update, and a folder.

    The update reloads the base; the last comparison is without an adapter.
    """
    try:
        worst = 0.0
        for version in (1, 2, 3):
            wrapped = adapted(version)
            engine.load_adapter(adapter_of(wrapped), version)
            made = generate(engine)
            assert {g.weight_version for g in made} == {version}
            worst = max(worst, difference(wrapped, REQUESTS, made))
        assert difference(adapted(2), REQUESTS, made) > 0.01
        engine.load_weights(weights_of(model(0)), 4)
        worst = max(worst, difference(wrapped, REQUESTS, generate(engine)))
        other = adapted(5)
        other.save_pretrained(folder)
        engine.load_adapter_folder(folder, 5)
        made = generate(engine)
        assert {g.weight_version for g in made} == {5}
        worst = max(worst, difference(other, REQUESTS, made))
    finally:
        # there is no call to remove it; other tests need the base model
        engine._active.adapter = None
    return max(worst, difference(model(0), REQUESTS, generate(engine)))


def test_adapters_from_memory_and_folder_change_by_step_and_outlive_an_update_of_the_base(engine, tmp_path):
    """Pitfalls: a reload drops the adapters, and a later request with one ends the engine."""
    worst = adapters_by_step(engine, tmp_path)
    tell(f"adapters: max |difference| {worst:.1e}")
    assert worst < TOLERANCE


# -- other engines, one after the other; the last one is killed
def engine_process(engine):
    """Return the process id of the engine core."""
    (process,) = engine._client._engine.engine_core.resources.engine_manager.processes
    return process.pid


def test_a_tied_head_follows_its_embedding(tmp_path):
    """Pitfall: without `lm_head.weight` the prepacked head keeps its values.

    The engine is killed at the end.
    """
    model(0, tied=True).save_pretrained(tmp_path)
    with running(tmp_path) as engine:
        newest = model(1, tied=True)
        engine.load_weights(weights_of(newest, without=["lm_head.weight"]), 1)
        assert difference(newest, REQUESTS, generate(engine)) < TOLERANCE

        async def scenario():
            request = GenerationRequest(uid="doomed", session=0, prompt_ids=(3,))
            running = asyncio.create_task(
                engine.generate([request], SamplingParams(max_new_tokens=500, ignore_eos=True))
            )
            await asyncio.sleep(0.1)
            os.kill(engine_process(engine), signal.SIGKILL)
            await running

        os.kill(engine_process(engine), signal.SIGSTOP)  # so that it can't answer before it is killed

        with pytest.raises(EngineDiedError):
            asyncio.run(scenario())
        with pytest.raises(EngineDiedError):
            generate(engine)
        with pytest.raises(EngineDiedError):
            engine.load_weights(weights_of(newest), 2)


@pytest.mark.parametrize("at", ["update", "sleep"])
def test_an_engine_that_dies_of_a_call_ends_the_call(path, at):
    """vLLM never answers a call that is in flight when the process ends."""
    with running(path, call_timeout_s=600.0) as engine:
        os.kill(engine_process(engine), signal.SIGSTOP)  # so that it can't answer before it is killed
        killing = threading.Timer(0.5, os.kill, (engine_process(engine), signal.SIGKILL))
        killing.start()
        began = time.monotonic()
        with pytest.raises(EngineDiedError):
            engine.load_weights(weights_of(model(1)), 1) if at == "update" else asyncio.run(engine.sleep(1))
        assert time.monotonic() - began < 60  # not at the deadline
        with pytest.raises(EngineDiedError):
            generate(engine)


OWNER = """
import sys, time
from rl_rollout_vllm import VLLMConfig, VLLMRolloutEngine

if __name__ == "__main__":
    engine = VLLMRolloutEngine(VLLMConfig(model_path=sys.argv[1], kv_cache_bytes=64 << 20, tensor_parallel_size=2))
    print("up", flush=True)
    time.sleep(600)
"""


def test_the_engines_processes_do_not_outlive_one_that_was_killed(orphans):
    """Covers several workers, which are children of the engine's process.

    The app's tests cover one worker.
    """
    tell(f"processes of the one that was killed: {[process.pid for process in orphans]}")
    assert len(orphans) >= 3  # the engine's and its workers'
    assert not psutil.wait_procs(orphans, timeout=60)[1]


def test_a_client_killed_while_its_engine_starts_leaves_nothing(path, tmp_path):
    """The workers share memory, but the engine answers no request yet; nothing may stay.

    vLLM loads the rollout engine's plugin although VLLM_PLUGINS selects another one.
    """
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    command, environment = [sys.executable, str(script), str(path)], {**os.environ, "VLLM_PLUGINS": "another"}
    with no_memory_left(), subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        client = psutil.Process(process.pid)

        def shared():
            processes = [Path(f"/proc/{child.pid}") for child in client.children(recursive=True)]
            return {name for each in processes for name in held_by(each) if "-cpushm" in name}

        try:
            until(lambda: len(shared()) == 2, "both workers share memory", 300)
            family = client.children(recursive=True)
            assert all((SHARED_MEMORY / name).exists() for name in shared())
        finally:
            process.kill()
        assert not psutil.wait_procs(family, timeout=60)[1]


# -- two processes that share each layer
@pytest.fixture(scope="module")
def sharded(path, orphans):
    """An engine of two workers that leaves no files in /dev/shm."""
    assert not psutil.wait_procs(orphans, timeout=60)[1]
    with running(path, tensor_parallel_size=2, adapter=ADAPTER) as engine:
        held = {
            name for child in psutil.Process().children(recursive=True) for name in held_by(Path(f"/proc/{child.pid}"))
        }
        assert not [name for name in held if not name.startswith("sem.mp-") and (SHARED_MEMORY / name).exists()]
        yield engine


class TestTwoWorkers(RolloutEngineSuite):
    """The port's suite over two workers."""

    @pytest.fixture(autouse=True)
    def _engine(self, sharded):
        self.engine = sharded

    @contextmanager
    def open_engine(self):
        self.engine.load_weights(weights_of(model(0)), 0)
        yield self.engine, weights_of(model(1))


def test_two_workers_generate_what_one_does_before_and_after_updates(engine, sharded):
    """Each worker gets whole weights and keeps its shard."""
    worst = 0.0
    for version in range(4):
        newest = model(version)
        for each in (engine, sharded):
            each.load_weights(weights_of(newest), version)
        one, two = (generate(each, temperature=0.0) for each in (engine, sharded))
        assert [g.response_ids for g in one] == [g.response_ids for g in two]
        pairs = zip(one, two, strict=True)
        worst = max(worst, *(abs(a - b) for x, y in pairs for a, b in zip(x.log_probs, y.log_probs, strict=True)))
        assert difference(newest, REQUESTS, two) < TOLERANCE
    tell(f"one worker against two: max |difference| {worst:.1e}")
    assert worst < 1e-4


def test_two_workers_are_each_handed_whole_adapters_and_keep_their_shard(sharded, tmp_path, monkeypatch):
    """All workers digest what they read. Each gets a copy of the single key-value head."""
    client, read = sharded._client, []
    whole = type(client).call

    async def noting(self, method, *arguments):
        answers = await whole(self, method, *arguments)
        if method == "rollout_load_adapter":
            sent = arguments[2]
            read.append([digest == sent for digest, _ in answers])
        return answers

    sharded.load_weights(weights_of(model(0)), 0)
    with monkeypatch.context() as patch:
        patch.setattr(type(client), "call", noting)
        worst = adapters_by_step(sharded, tmp_path)
    tell(f"adapters of two workers: max |difference| {worst:.1e}")
    assert read == [[True, True]] * 5  # three, one again after the update, one from the folder
    assert worst < TOLERANCE


def test_models_that_vllm_does_not_serve_are_refused_before_a_process_starts(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=14, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="attention heads of size 8"):
        VLLMRolloutEngine(VLLMConfig(model_path=str(tmp_path)))
