"""`train(quiet=True)`: no progress bars and no warnings of libraries that the caller has loaded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

_LIBRARIES = ("datasets", "huggingface_hub", "ray", "transformers")
"""They log through handlers of their own."""


@contextmanager
def quiet_libraries() -> Generator[None]:
    """Print no bars and no log lines below errors; each library is as before on exit.

    A library that is loaded later shows no bars in the process of the caller: the run reads and
    writes models in its workers.
    """
    with ExitStack() as stack:
        for name in _LIBRARIES:
            for handler in logging.getLogger(name).handlers:
                stack.callback(handler.setLevel, handler.level)
                handler.setLevel(max(handler.level, logging.ERROR))
        for name in ("huggingface_hub.utils", "datasets.utils"):
            if library := sys.modules.get(name):
                hidden = library.are_progress_bars_disabled()
                # transformers switches the bars of the hub with its own: hide hidden ones again
                stack.callback(library.disable_progress_bars if hidden else library.enable_progress_bars)
                library.disable_progress_bars()
        transformers = sys.modules.get("transformers.utils.logging")
        if transformers and transformers.is_progress_bar_enabled():
            stack.callback(transformers.enable_progress_bar)
            transformers.disable_progress_bar()
        yield
