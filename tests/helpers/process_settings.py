"""Settings of this process that tests and the code under test change."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

SEED = 0


@dataclass(frozen=True)
class LibrarySetting:
    """A setting of a library that may be imported later, or never.

    Args:
        module: the module that has the setting.
        default: the value after the import.
        read, write: functions of the module.
    """

    module: str
    default: object
    read: Callable[[ModuleType], object]
    write: Callable[[ModuleType, Any], object]

    def value(self) -> object:
        module = sys.modules.get(self.module)
        return self.default if module is None else self.read(module)

    def restore(self, value: object) -> None:
        module = sys.modules.get(self.module)
        if module is not None and self.read(module) != value:
            self.write(module, value)


def _show_bars(module: ModuleType, shown: bool) -> None:
    module.enable_progress_bars() if shown else module.disable_progress_bars()


LIBRARIES = (
    # This one sets huggingface_hub's bars, too, and therefore comes first.
    LibrarySetting(
        "transformers.utils.logging",
        True,
        lambda module: module.is_progress_bar_enabled(),
        lambda module, shown: module.enable_progress_bar() if shown else module.disable_progress_bar(),
    ),
    LibrarySetting(
        "transformers.utils.logging",
        logging.WARNING,
        lambda module: module.get_verbosity(),
        lambda module, level: module.set_verbosity(level),
    ),
    LibrarySetting("huggingface_hub.utils", True, lambda module: not module.are_progress_bars_disabled(), _show_bars),
    LibrarySetting("datasets", True, lambda module: not module.are_progress_bars_disabled(), _show_bars),
    LibrarySetting(
        "torch",
        int(os.environ.get("OMP_NUM_THREADS", "1")),
        lambda module: module.get_num_threads(),
        lambda module, threads: module.set_num_threads(threads),
    ),
)


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore environment, working directory, logging, signals and `LIBRARIES` on exit.

    Handlers that were added to the root logger are closed.
    """
    with ExitStack() as stack:
        for setting in reversed(LIBRARIES):  # the stack restores the last one first
            stack.callback(setting.restore, setting.value())
        stack.callback(_restore_environment, dict(os.environ))
        stack.callback(os.chdir, Path.cwd())
        root = logging.getLogger()
        stack.callback(_restore_handlers, root, list(root.handlers))
        stack.callback(root.setLevel, root.level)
        stack.callback(logging.captureWarnings, capture=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            if (handler := signal.getsignal(number)) is not None:  # None: it was not set from Python
                stack.callback(signal.signal, number, handler)
        stack.callback(setattr, sys, "excepthook", sys.excepthook)  # torch.distributed and wandb replace it
        yield


def _restore_environment(before: dict[str, str]) -> None:
    before = before | {name: value for name, value in os.environ.items() if name == "PYTEST_CURRENT_TEST"}
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _restore_handlers(logger: logging.Logger, before: list[logging.Handler]) -> None:
    for handler in set(logger.handlers) - set(before):
        logger.removeHandler(handler)
        handler.close()


def seed_all() -> None:
    """Seed Python, numpy and, where it is imported, torch."""
    random.seed(SEED)
    np.random.seed(SEED)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(SEED)  # torch.manual_seed also queues a call for each CUDA device
