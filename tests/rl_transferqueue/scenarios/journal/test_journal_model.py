"""Nothing acknowledged is lost, whenever the power goes; the syncs are what makes it so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_model import LIVES, run_history
from lossy_disk import SYNCS, LossyDisk

LAST_RUN = Path(__file__).with_name("power_loss_last_run.json")
HISTORIES = 10_000


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_acknowledged_records_survive_every_loss_of_power(seed: int) -> None:
    run_history(seed, LossyDisk())


def _first_loss(without: str, seeds: range) -> int | None:
    """The first seed whose history loses something without this sync."""
    for seed in seeds:
        try:
            run_history(seed, LossyDisk(without))
        except AssertionError:
            return seed
    return None


@pytest.mark.parametrize("without", SYNCS)
def test_the_model_catches_a_missing_sync(without: str) -> None:
    assert _first_loss(without, range(1000)) is not None


@pytest.mark.nightly
def test_ten_thousand_histories() -> None:
    """The counts are committed, so that a change of what is covered shows."""
    losses = kills = 0
    failed: list[int] = []
    for seed in range(HISTORIES):
        try:
            counted = run_history(seed, LossyDisk())
        except AssertionError:
            failed.append(seed)
        else:
            losses, kills = losses + counted.power_losses, kills + counted.kills
    caught = {without: _first_loss(without, range(1000)) for without in SYNCS}
    found = {
        "histories": HISTORIES,
        "lives of each": LIVES,
        "losses of power": losses,
        "processes killed": kills,
        "histories that lost something": failed,
        "first history that loses something without the sync of": caught,
    }
    LAST_RUN.write_text(json.dumps(found, indent=2) + "\n")
    assert not failed
    assert None not in caught.values()
