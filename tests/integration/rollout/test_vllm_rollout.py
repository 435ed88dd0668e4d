"""The app with vLLM as its rollout engine, on CPU.

Needs vLLM; see CONTRIBUTING for its environment.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

import psutil
import pytest
from app_runs import processes_of, started
from polling import until

from rl_protocol.ports import SamplingParams
from rl_rollout_vllm import VLLMConfig, VLLMRolloutEngine
from rl_trainer.rollout.serving import Endpoint, EndpointConfig, over_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


VLLM = ("rollout.name=vllm", "rollout.kv_cache_mb=64", "rollout.max_batch_size=64", "ray.start_timeout_s=400")
TOLERANCE = 1e-3
ADAPTER_BYTES = 4 * 8 * 2 * (4 * (128 + 128) + 3 * (128 + 256))
"""Rank 8 of the demo model's two layers in float32.

q, k, v and o are 128 x 128, gate and up 256 x 128, down 128 x 256.
"""


def three_steps(app, *overrides):
    """Return the metrics of three steps; an engine of two processes gets the weights after each."""
    done = app(
        *VLLM,
        *overrides,
        "rollout.tensor_model_parallel_size=2",
        "trainer.val_before_train=false",
        "trainer.total_training_steps=3",
        "trainer.test_freq=0",
        timeout=550,
    )
    assert done.code == 0, done.err
    trained = [m for m in done.metrics if m["step"]]
    assert [m["weight_sync/version"] for m in trained] == [1, 2, 3]
    assert [m["training/off_policy/trajectory_staleness_worst/max"] for m in trained] == [0, 0, 0]
    # In every turn, vLLM's log-probs under the weights of the last sync equal the trainer's under
    # its own.
    assert max(m["training/rollout_log_probs_diff_max"] for m in trained) < TOLERANCE
    assert all(m["actor/grad_norm"] > 0 for m in trained)
    return trained


def test_a_policy_with_a_tool_trains_with_an_engine_of_two_processes(app, calculator_model):
    """Several turns: vLLM gets each tool result as part of the next prompt.

    Every step sends whole weights to every shard. During the update, vLLM gives back the memory of
    keys and values; on the CPU it can't drop weights.
    """
    model, sleeps = f"model.path={calculator_model}", "rollout.free_cache_engine=true"
    trained = three_steps(app, "algorithm=grpo_calculator", model, "actor.use_kl_loss=false", sleeps)
    for m in trained:  # two processes with a cache of at most 64 MiB each, which is rounded down to blocks
        assert 100 << 20 < m["perf/sleep_freed_bytes"] <= 128 << 20
        assert m["timing_s/sleep"] > 0 < m["timing_s/wake"]
    assert sum(m["agent/tool_calls/mean"] for m in trained) > 0


def test_adapters_alone_reach_every_shard_of_an_engine_of_two_processes(app):
    """Each worker gets the whole adapter and keeps its shard.

    The delta engine counts the bytes that changed since the step before. If the sync sent nothing,
    the log-probs of this run would differ by some tenths.
    """
    trained = three_steps(app, "lora.rank=8", "actor.optim.lr=3e-3", "checkpoint_engine.backend=delta-shm")
    assert {m["weight_sync/bytes"] for m in trained} == {ADAPTER_BYTES}
    assert min(m["weight_sync/changed_share"] for m in trained) > 0.9
    assert trained[-1]["training/rollout_log_probs_diff_max"] > 0


@pytest.mark.parametrize(
    ("on_update", "more"),
    [
        ("continue", ("async_rl.order=ready_first", "async_rl.when_stale=drop")),
        ("abort", ("algorithm.old_log_prob=interpolate",)),
    ],
)
def test_new_weights_take_over_the_responses_that_vllm_generates(app, on_update, more):
    """Responses are long, and those of three prompts at a time are generated during all updates."""
    done = app(
        *VLLM,
        *more,
        "async_rl.max_staleness=2",
        f"async_rl.on_update={on_update}",
        "async_rl.max_inflight_prompts=3",
        "rollout.ignore_eos=true",
        "rollout.response_length=56",
        "trainer.total_training_steps=6",
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        timeout=550,
    )
    assert done.code == 0, done.err
    found = re.search(r"(\d+) prompts finished = 48 trained \+ (\d+) dropped \+ 0 held", done.out)
    assert found is not None, done.out
    assert int(found[1]) == 48 + int(found[2])
    steps = [m for m in done.metrics if m["step"]]
    counted, other = ("continued", "restarted") if on_update == "continue" else ("restarted", "continued")
    assert sum(m[f"async/{counted}"] for m in steps) > 0
    assert {m[f"async/{other}"] for m in steps} == {0}
    ages = [m["training/off_policy/trajectory_staleness_worst/max"] for m in steps]
    assert 0 < max(ages) <= 2
    if on_update == "abort":
        assert all("timing_s/old_log_prob" not in m for m in steps)
        assert {m["training/off_policy/trajectory_spans/max"] for m in steps} == {1}


def engine_of(worker: int) -> psutil.Process:
    """Return the process of vLLM's engine, a descendant of the rollout worker.

    It is looked for again if one look at the processes does not show it.
    """
    found = list[psutil.Process]()

    def one() -> bool:
        children = psutil.Process(worker).children(recursive=True)
        found[:] = [each for each in children if "EngineCor" in each.name() + " ".join(each.cmdline())]
        return len(found) == 1

    until(one, f"an engine of process {worker}", 10)
    return found[0]


def test_adapters_of_megatron_are_served_and_an_engine_that_is_killed_is_replaced(tmp_path, base_model, mark):
    """vLLM loads the base at its start and gets only the adapter from each sync.

    The new engine repeats the requests that the killed one had not answered.
    """
    steps, folder = 40, tmp_path / "run"  # so many that it still trains when the engine is killed
    run = started(
        mark,
        folder,
        *VLLM,
        f"model.path={base_model}",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        "data.val_size=32",
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=8",
        "actor.use_kl_loss=false",
        "actor.optim.lr=1e-2",
        "rollout.num_workers=1",
        "model_engine=megatron",
        "lora.rank=8",
        lines=2,
        timeout_s=300,
    )
    try:
        engine_of(processes_of(folder, "rollout-0")[0]).kill()
        out, err = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 0, (out, err)
    log = (folder / "logs" / "driver.log").read_text()
    assert "Receiver rollout-0 is quarantined: " in log
    # it generated when it was killed, or it got weights
    assert "The process of the vLLM engine is gone" in log or "a load failed midway" in log
    said = "rollout worker rollout-0 is lost and gets a new process (restart 1 of at most 6 an hour, in 1 s): "
    assert said in log
    assert said in out
    trained = [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if line["step"]]
    assert [m["weight_sync/version"] for m in trained] == list(range(1, steps + 1))
    assert [m["training/off_policy/trajectory_staleness_worst/max"] for m in trained] == [0] * steps
    for m in trained:  # 8 responses to each of 8 prompts, in every step
        assert m["perf/total_num_tokens"] == pytest.approx(64 * (m["prompt_length/mean"] + m["response_length/mean"]))
    assert {m["weight_sync/bytes"] for m in trained} == {ADAPTER_BYTES}
    assert max(m["training/rollout_log_probs_diff_max"] for m in trained) < TOLERANCE


AGENT = """
import json, sys, urllib.request
base_url, key = sys.argv[1:]
body = json.dumps({"model": "tiny", "prompt": [3, 4], "n": 4, "return_token_ids": True}).encode()
request = urllib.request.Request(base_url + "/completions", body, {"Authorization": "Bearer " + key})
with urllib.request.urlopen(request, timeout=120) as answer:
    print(json.dumps(json.load(answer)["choices"]))
"""


def tiny_model(seed: int):
    """Return a Qwen2 model over 14 tokens."""
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
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).float().eval()


@pytest.mark.filterwarnings("default")  # for vLLM's own warnings
def test_an_agents_tokens_have_the_log_probs_of_the_version_that_made_them_across_an_update(tmp_path, mark):
    """Another process calls the endpoint over vLLM during a weight update.

    The update interrupts its responses; they continue with the new weights and can be trained on.
    """
    import torch

    from rl_protocol.torch import to_weight

    models = [tiny_model(0), tiny_model(1)]
    models[0].save_pretrained(tmp_path)
    sampling = SamplingParams(max_new_tokens=400, ignore_eos=True)
    config = EndpointConfig(model="tiny", context=512, sampling=sampling, key=b"k" * 32)
    engine = VLLMRolloutEngine(VLLMConfig(model_path=str(tmp_path), kv_cache_bytes=64 << 20))

    async def scenario():
        policy = over_engine(engine, sampling, "agent")
        async with asyncio.timeout(240), Endpoint(config) as endpoint, endpoint.session((3, 4), policy) as session:
            agent = await asyncio.create_subprocess_exec(
                sys.executable, "-c", AGENT, session.base_url, "k" * 32, stdout=asyncio.subprocess.PIPE
            )
            # vLLM sends no events
            while len(engine._requests.running) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            weights = [to_weight(name, tensor) for name, tensor in models[1].state_dict().items()]
            await asyncio.to_thread(engine.load_weights, weights, 1)
            answer, _ = await agent.communicate()
            return json.loads(answer), session.recorder.trajectories()

    try:
        choices, trajectories = asyncio.run(scenario())
    finally:
        engine.close()
    assert [tuple(choice["token_ids"]) for choice in choices] == [t.response_ids for t in trajectories]
    assert any(1 in choice["weight_versions"] for choice in choices)
    for choice, one in zip(choices, trajectories, strict=True):
        versions = choice["weight_versions"]
        assert (len(versions), versions, one.weight_version) == (400, sorted(versions), versions[0])
        with torch.no_grad():
            logits = [model(torch.tensor([[3, 4, *one.response_ids]])).logits[0, 1:-1] for model in models]
        tables = [torch.log_softmax(each, dim=-1) for each in logits]
        by_hand = [
            tables[v][place, token].item()
            for place, (v, token) in enumerate(zip(versions, one.response_ids, strict=True))
        ]
        assert one.log_probs == pytest.approx(by_hand, abs=TOLERANCE)
