"""How the processes of one Ray cluster find the plane: a named actor, as in 0.1.11. Nothing happens in processes where Ray does not run."""

from __future__ import annotations

import sys
from typing import Any, cast

_NAME = "TransferQueueController"
_NAMESPACE = "transfer_queue"
_DEADLINE_S = 30.0


class _Board:
    """Holds the announcement of a plane."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read(self) -> str:
        """The announcement."""
        return self._text


def _ray() -> Any:
    """Ray, if this process has initialised it; it is never imported here."""
    ray = cast("Any", sys.modules.get("ray"))
    return ray if ray is not None and ray.is_initialized() else None


def find() -> str:
    """The announced plane; "" if there is none."""
    ray = _ray()
    if ray is None:
        return ""
    try:
        board = ray.get_actor(_NAME, namespace=_NAMESPACE)
        return str(ray.get(board.read.remote(), timeout=_DEADLINE_S))
    except (ValueError, ray.exceptions.RayActorError):
        return ""


class Notice:
    """An announcement of ours. The actor lives as long as this does, and ends with this process."""

    def __init__(self, board: Any) -> None:
        self._board = board

    def withdraw(self) -> None:
        """Take it back."""
        ray = _ray()
        if ray is not None and self._board is not None:
            ray.kill(self._board)


def announce(text: str) -> Notice | None:
    """Tell the others; None: somebody else has announced another plane."""
    ray = _ray()
    if ray is None:
        return Notice(None)
    try:
        board = ray.remote(num_cpus=0)(_Board).options(name=_NAME, namespace=_NAMESPACE).remote(text)
    except ValueError:
        return None
    ray.get(board.read.remote(), timeout=_DEADLINE_S)  # from now on it can be found
    return Notice(board)
