"""A writer killed with SIGKILL leaves only complete folders, including all that it reported."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_megatron_peft import read_adapter

WRITER = """
import sys
from pathlib import Path
import numpy as np
from rl_megatron_peft import Adapter, LoraConfig, LoraPair, write_adapter
from rl_protocol import WeightTensor

def tensor(*shape):
    return WeightTensor("x", "float32", shape, np.ones(4 * shape[0] * shape[1], np.uint8))

names = [f"model.layers.{i}.self_attn.q_proj" for i in range(4)]
pairs = {name: LoraPair(a=tensor(8, 20000), b=tensor(20000, 8)) for name in names}
adapter = Adapter(base_model="m", config=LoraConfig(rank=8, target_modules=("q_proj",)), pairs=pairs)
for i in range(10**6):
    write_adapter(Path(sys.argv[1]) / f"a-{i}", adapter)
    print(i, flush=True)
"""


def test_adapters_are_whole_wherever_the_writer_was_killed(tmp_path: Path):
    draw = random.Random(3)
    for run in range(4):
        root = tmp_path / str(run)
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        said = [int(process.stdout.readline())]
        time.sleep(draw.uniform(0, 0.15))
        process.kill()
        said += [int(line) for line in process.stdout.read().split("\n") if line]
        process.wait(timeout=600)
        process.stdout.close()
        found = {path.name for path in root.iterdir() if not path.name.startswith(".")}
        assert {f"a-{i}" for i in said} <= found
        assert len(found) <= len(said) + 1
        for name in found:
            assert len(read_adapter(root / name).pairs) == 4


@pytest.mark.nightly
def test_a_run_killed_ten_times_resumes_from_its_last_complete_checkpoint(models, program, tmp_path: Path):
    """World `killed` writes a checkpoint after every step and is killed at random moments."""
    command = [sys.executable, str(program.__spec__.origin), str(models), str(tmp_path), "some", "killed"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            assert process.wait(timeout=600) == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    report = (tmp_path / "killed").read_text().split()
    assert len(report) == 11  # each start reports the step it resumes from
    steps = [int(step) for step in report]
    assert steps == sorted(steps)
    assert steps[-1] > 0
