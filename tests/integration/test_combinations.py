"""Every pair of engine, adapters, roles and rows trains five steps, or is refused with a reason.

`combinations.json` has the results of the whole table; `docs/combinations.md` shows them.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from combinations_table import ENGINES, MARKDOWN, RESULTS, table

PROGRAM = Path(__file__).with_name("combinations_program.py")
CELLS = [
    "/".join(cell) for cell in itertools.product(("full", "lora", "dora"), ("actor", "critic"), ("text", "images"))
]
ONE_OF_EACH = {"torch": "lora/critic/images", "fsdp": "dora/actor/images", "megatron": "full/actor/images"}


@pytest.fixture
def session(base_model, make_vision_model, tmp_path):
    """Run cells of an engine, and return the result of each."""

    def run(engine, *cells):
        command = [sys.executable, PROGRAM, engine, base_model, make_vision_model(), tmp_path, *cells]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads((tmp_path / f"{engine}.json").read_text())

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "cell"), ONE_OF_EACH.items())
def test_one_cell_of_each_engine_is_as_in_the_table(session, engine, cell):
    assert session(engine, cell) == {cell: json.loads(RESULTS.read_text())[engine][cell]}


@pytest.mark.nightly
def test_each_cell_trains_or_is_refused_as_in_the_table(session):
    found = {engine: session(engine, *CELLS) for engine in ENGINES}
    known = json.loads(RESULTS.read_text())
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    assert found == known


def test_the_page_shows_the_results_and_only_images_with_megatron_are_refused():
    results = json.loads(RESULTS.read_text())
    assert list(results) == list(ENGINES)
    assert all(list(cells) == CELLS for cells in results.values())
    refused = {
        (engine, cell.rpartition("/")[2]) for engine in results for cell in CELLS if results[engine][cell] != "runs"
    }
    assert refused == {("megatron", "images")}
    assert table(results) in MARKDOWN.read_text()
