"""Mistakes of a newcomer: each is refused with its cause and remedy before anything starts.

Mistakes in data and models have more tests in rl_app_ppo/inputs and rl_app_ppo/checks.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from app_runs import command

pytestmark = pytest.mark.slow

ROW = '{"prompt": [{"role": "user", "content": "1+1="}], "data_source": "x", "reward_model": {"ground_truth": "2"}}\n'
FILES = {
    "rows.jsonl": ROW,
    "text.jsonl": "not json\n",
    "columns.jsonl": '{"question": "1+1="}\n',
    "empty.jsonl": "",
    "bytes.parquet": "no parquet",
    "near.py": "def score(prompt, response, truth):\n    return 1.0\n",
    "no_weights/config.json": '{"model_type": "gpt2"}',
    "cut_off/config.json": '{"model_type": "gpt2"',
    "a_file": "",
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
    "output is a file": (["trainer.output_dir=a_file"], ["a_file", "set trainer.output_dir"]),
    "no such network": (["trainer.network_interface=eth77"], ["trainer.network_interface", "'eth77'"]),
    "disk": (["trainer.min_free_disk_mb=100000000"], ["trainer.min_free_disk_mb", "trainer.output_dir"]),
    "no GPU": (["fsdp.device=cuda", "model_engine=fsdp"], ["fsdp.device=cuda", "cpu"]),
    "no cluster": (
        ["ray.address=127.0.0.1:CLOSED"],
        ["ray.address=127.0.0.1:", "ray start --head", "ray.address=local"],
    ),
}


@pytest.fixture
def closed_port() -> Iterator[str]:
    """A port that nothing listens at, and that nobody else gets."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield str(held.getsockname()[1])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_with_cause_and_remedy(mistake: str, tmp_path: Path, closed_port: str) -> None:
    overrides, words = MISTAKES[mistake]
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        command(*(word.replace("CLOSED", closed_port) for word in overrides)),
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tmp_path,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert "rl-app-ppo" not in done.stdout  # the banner of a run
    assert not (tmp_path / "outputs").exists()
    for word in words:
        assert word in done.stderr
