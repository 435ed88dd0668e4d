"""The pictures of terminal and report are made from a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from chromium import find_chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_chromium() is None, reason="NO PICTURE IS MADE: chromium is not installed (apt-get install chromium)"
    ),
]

SCRIPT = Path(__file__).resolve().parents[2] / "helpers" / "pictures.py"
IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"


def texts(file: Path) -> str:
    """The letters of an SVG; it has no break between rows."""
    return "".join(ElementTree.parse(file).getroot().itertext()).replace("\xa0", " ")


def test_the_pictures_of_a_run(base_model: Path, tmp_path: Path):
    settings = [f"model.path={base_model}", "trainer.total_training_steps=4", "trainer.test_freq=2"]
    settings += ["data.train_batch_size=16", "data.val_size=32"]
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/4" in texts(tmp_path / "terminal-run.svg")
    assert "step 3/4" not in texts(tmp_path / "terminal-run.svg")
    assert "\u256d\u2500 demo " in texts(tmp_path / "terminal-run.svg")  # the live panel
    assert "validation accuracy 0." in texts(tmp_path / "terminal-end.svg")
    assert "@font-face" not in (tmp_path / "terminal-end.svg").read_text()  # a font of another host
    for name in ("report-overview.png", "report-sample.png", "report-bad.png", "report-timeline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} <= {path.name for path in IMAGES.iterdir()}
