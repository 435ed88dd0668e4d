"""A reward model served by a real vLLM has the scores of transformers, and rewards a run."""

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

from rl_trainer.record.read_record import read_record
from rl_trainer.rewards import Failure, Sample
from rl_trainer.rewards.scorer_toml import RewardModelConfig, ServedModelConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]
WORDS = 64
"""Tokens of the model: more than those of the demo, whose policy it rewards."""
SEQUENCES = [[5, 6, 7], [2], [9, 3, 4, 8, 11, 1], [5, 6, 7, 8], [13] * 16, [2, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

    made = tmp_path_factory.mktemp("models") / "reward"
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=WORDS,
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
    Qwen2ForSequenceClassification(config).save_pretrained(made)
    words = WordLevel({str(token): token for token in range(WORDS)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0").save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def url(folder: Path):
    """Yield the URL of a vLLM that serves this model."""
    log = folder.with_name("log")
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
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a server and all its processes.

    The last one removes vLLM's shared memory: if it were killed as soon as the server has ended,
    files would remain.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(60)
        until(lambda: not group_exists(process.pid), "all processes of the server end")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def samples(*sequences: list[int]) -> list[Sample]:
    return [Sample(data_source="s", solution_str="", ground_truth="", tokens=tokens) for tokens in sequences]


def test_scores_are_those_of_the_model_in_this_process(folder: Path, url: str):
    from rl_trainer.backends.reward_model import RewardModelScorer
    from rl_trainer.rewards.services.served_model import ServedModelScorer

    async def ask():
        scorer = ServedModelScorer(ServedModelConfig(url=url, model="reward", attempts=1), 120.0)
        try:
            return await scorer.score(samples(*SEQUENCES, [3] * 65))
        finally:
            await scorer.close()

    *outcomes, long = asyncio.run(ask())
    here = asyncio.run(RewardModelScorer(RewardModelConfig(path=str(folder), device="cpu")).score(samples(*SEQUENCES)))
    scores = [[one.numbers["score"] for one in found] for found in (outcomes, here)]
    assert apart(*scores) < 1e-3
    assert len({round(score, 3) for score in scores[0]}) == len(SEQUENCES)
    assert isinstance(long, Failure)
    assert long.message == "was refused with status 400"


def test_a_run_is_rewarded_by_it(app, url: str, folder: Path, tmp_path: Path):
    """The recorded rewards are the model's logits for the recorded tokens."""
    from rl_trainer.backends.reward_model import RewardModelScorer

    (tmp_path / "served.toml").write_text(f'kind = "served_model"\nurl = "{url}"\nmodel = "reward"\n')
    done = app("--trust", "served.toml", "reward.function=served.toml", "rollout.n=4")
    assert done.code == 0, done.err
    assert [step["reward/failures"] for step in done.metrics if step["step"]] == [0, 0]
    rows = read_record(done.folder / "record").trajectories
    assert {row.step for row in rows} == {1, 2}
    scorer = RewardModelScorer(RewardModelConfig(path=str(folder), device="cpu"))
    here = asyncio.run(scorer.score(samples(*(row.prompt_ids + row.response_ids for row in rows))))
    assert apart([row.reward["score"] for row in rows], [one.numbers["score"] for one in here]) < 1e-3
