"""How the processes of one Ray cluster find the plane: a named actor, as in 0.1.11. Nothing happens in processes where Ray does not run."""

from __future__ import annotations

import sys
from typing import Any, cast

from rl_protocol.errors import ConfigError, PlaneTimeout

_NAME = "TransferQueueController"
_NAMESPACE = "transfer_queue"


class _Board:
    """Holds the announcement of a plane."""

    def __init__(self, text: str, conf: Any) -> None:
        self._text = text
        self._conf = conf

    def read(self) -> str:
        """The announcement."""
        return self._text

    def get_config(self) -> Any:
        """What `init` returned where the plane was started, as 0.1.11's controller says."""
        return self._conf


def _ray() -> Any:
    """Ray, if this process has initialised it; it is never imported here."""
    ray = cast("Any", sys.modules.get("ray"))
    return ray if ray is not None and ray.is_initialized() else None


def find(timeout_s: float) -> str:
    """The announced plane; "" if there is none.

    Raises:
        PlaneTimeout: the actor does not answer within `timeout_s` seconds.
        ConfigError: the cluster runs TransferQueue itself.
    """
    ray = _ray()
    if ray is None:
        return ""
    try:
        board = ray.get_actor(_NAME, namespace=_NAMESPACE)
        if not hasattr(board, "read"):
            raise ConfigError(
                f"The Ray cluster has an actor {_NAME!r} of TransferQueue itself; close that plane, or use another cluster."
            )
        return _read(ray, board, timeout_s)
    except (ValueError, ray.exceptions.RayActorError):
        return ""


def _read(ray: Any, board: Any, timeout_s: float) -> str:
    try:
        return str(ray.get(board.read.remote(), timeout=timeout_s))
    except ray.exceptions.GetTimeoutError as error:
        raise PlaneTimeout(
            f"The Ray actor {_NAME!r}, which says where the plane is, did not answer within {timeout_s:g} s; raise "
            "rl_transferqueue.timeout_s, or see why the cluster can't run it."
        ) from error


class Notice:
    """An announcement of ours. The actor lives as long as this does, and ends with this process."""

    def __init__(self, board: Any) -> None:
        self._board = board

    def withdraw(self) -> None:
        """Take it back."""
        ray = _ray()
        if ray is not None and self._board is not None:
            ray.kill(self._board)


def announce(text: str, conf: Any, timeout_s: float) -> Notice | None:
    """Tell the others; None: somebody else has announced another plane.

    Args:
        text: the announcement.
        conf: what the actor's `get_config` returns.
        timeout_s: seconds until the actor must run.

    Raises:
        PlaneTimeout: it does not.
    """
    ray = _ray()
    if ray is None:
        return Notice(None)
    try:
        board = ray.remote(num_cpus=0)(_Board).options(name=_NAME, namespace=_NAMESPACE).remote(text, conf)
    except ValueError:
        return None
    notice = Notice(board)
    try:
        _read(ray, board, timeout_s)  # from now on it can be found
    except PlaneTimeout:
        notice.withdraw()
        raise
    return notice
