"""Nothing acknowledged is lost, whenever the power goes; the syncs are what makes it so."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_model import run_history
from lossy_files import LossyFiles, WithoutFolderSync, WithoutPayloadSync


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_acknowledged_records_survive_every_loss_of_power(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_history(seed, Path(folder), LossyFiles())


@pytest.mark.parametrize("mutant", [WithoutPayloadSync, WithoutFolderSync])
def test_the_model_catches_a_missing_sync(mutant: type[LossyFiles], tmp_path: Path) -> None:
    caught = 0
    for seed in range(200):
        try:
            run_history(seed, tmp_path, mutant())
        except AssertionError:
            caught += 1
    assert caught
