"""A reward model served by a real vLLM has the scores of transformers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from polling import until
from relative import apart

from rl_trainer.rewards import Failure, Sample
from rl_trainer.rewards.scorer_toml import RewardModelConfig, ServedModelConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]
SEQUENCES = [[5, 6, 7], [2], [9, 3, 4, 8, 11, 1], [5, 6, 7, 8], [13] * 16, [2, 3]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=14,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    words = WordLevel({str(token): token for token in range(14)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0").save_pretrained(tmp_path / "reward")
    return tmp_path / "reward"


@contextlib.contextmanager
def served(folder: Path, log: Path):
    """Yield the URL of a vLLM that serves this model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # what `vllm serve` runs; with vLLM for the CPU, that command looks for the distribution "vllm"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--runner", "pooling"]
    command += ["--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--enforce-eager"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*map(str, command), "--served-model-name", "reward"],
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
    try:
        until(lambda: process.poll() is not None or "startup complete" in log.read_text(), "vLLM serves", 400)
        assert process.poll() is None, log.read_text()[-3000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def samples(*sequences: list[int]) -> list[Sample]:
    return [Sample(data_source="s", solution_str="", ground_truth="", tokens=tokens) for tokens in sequences]


def test_scores_are_those_of_the_model_in_this_process(folder: Path, tmp_path: Path):
    from rl_trainer.backends.reward_model import RewardModelScorer
    from rl_trainer.rewards.services.served_model import ServedModelScorer

    async def ask(url: str):
        scorer = ServedModelScorer(ServedModelConfig(url=url, model="reward", attempts=1), 120.0)
        try:
            return await scorer.score(samples(*SEQUENCES, [3] * 65))
        finally:
            await scorer.close()

    with served(folder, tmp_path / "log") as url:
        *outcomes, long = asyncio.run(ask(url))
    here = asyncio.run(RewardModelScorer(RewardModelConfig(path=str(folder), device="cpu")).score(samples(*SEQUENCES)))
    scores = [[one.numbers["score"] for one in found] for found in (outcomes, here)]
    assert apart(*scores) < 1e-3
    assert len({round(score, 3) for score in scores[0]}) == len(SEQUENCES)
    assert isinstance(long, Failure)
    assert long.message == "was refused with status 400"
