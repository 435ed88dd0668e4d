"""What a test changes in its process is restored before the next one."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from pathlib import Path

import datasets
import numpy as np
import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from process_settings import seed_all, settings_kept
from transformers.utils import logging as transformers_logging


def settings() -> list[object]:
    root = logging.getLogger()
    return [
        dict(os.environ),
        Path.cwd(),
        (root.level, list(root.handlers)),
        signal.getsignal(signal.SIGUSR1),
        sys.excepthook,
        (transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()),
        are_progress_bars_disabled(),
        datasets.are_progress_bars_disabled(),
        torch.get_num_threads(),
    ]


def test_every_setting_that_changes_is_restored(tmp_path: Path):
    os.environ["OLD"] = os.environ["GONE"] = "1"
    transformers_logging.enable_progress_bar()  # and huggingface_hub's, whose own switch comes later
    disable_progress_bars()
    datasets.enable_progress_bars()
    torch.set_num_threads(1)
    before = settings()
    with settings_kept():
        os.environ.update(OLD="2", NEW="3")
        del os.environ["GONE"]
        os.chdir(tmp_path)
        handler = logging.FileHandler(tmp_path / "log")
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.DEBUG)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        sys.excepthook = print
        transformers_logging.disable_progress_bar()
        enable_progress_bars()
        transformers_logging.set_verbosity_debug()
        datasets.disable_progress_bars()
        torch.set_num_threads(2)
        changed = settings()
    assert settings() == before
    assert not [a for a, b in zip(before, changed, strict=True) if a == b], "the test changed each of them"
    assert handler.stream is None, "it is closed"


def test_each_test_starts_from_the_same_seeds():
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), torch.rand(1).item()

    first = drawn()
    assert drawn() != first
    seed_all()
    assert drawn() == first
