"""An executor for calls that must see the stand-in for a GPU, which is of one thread."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Any


class ThisThread(Executor):
    """Runs each call at once, in the thread that submits it; takes the arguments of a pool."""

    def __init__(self, **_: Any) -> None:
        pass

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(fn(*args, **kwargs))
        return done
