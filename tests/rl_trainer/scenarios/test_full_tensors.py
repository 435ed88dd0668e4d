"""Gathering the full parameters of a model that is sharded over ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_trainer.backends.parallel_strategy import full_tensors

PROGRAM = Path(__file__).parents[1] / "programs" / "gather_together.py"


def test_tensors_of_one_process_are_yielded_as_they_are():
    first, second = torch.ones(2, requires_grad=True), torch.zeros(3)
    found = dict(full_tensors([("a", (first, second)), ("none", ()), ("b", (second,))]))
    assert list(found) == ["a", "none", "b"]
    assert found["none"] == []
    assert [tensor.data_ptr() for tensor in found["a"]] == [first.data_ptr(), second.data_ptr()]
    assert not found["a"][0].requires_grad


@pytest.mark.slow
def test_three_ranks_gather_small_tensors_together(tmp_path):
    ran = subprocess.run([sys.executable, str(PROGRAM), str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found["equal"]) == 7
        assert all(found["equal"].values()), found
        # the four small ones, and the two after the large one, which PyTorch gathers by itself
        assert found["collectives"] == 2
