"""Find and announce the plane through a named Ray actor, as 0.1.11 does."""

from __future__ import annotations

import sys
from typing import Any, cast

from rl_protocol.errors import ConfigError, PlaneTimeout

_NAME = "TransferQueueController"
_NAMESPACE = "transfer_queue"


class _Announcer:
    """The Ray actor that holds the announcement of a plane."""

    def __init__(self, text: str, conf: Any) -> None:
        self._text = text
        self._conf = conf

    def read(self) -> str:
        """The announcement."""
        return self._text

    def get_config(self) -> Any:
        """What `init` returned in the process that started the plane."""
        return self._conf


def _ray() -> Any:
    """Ray, if this process has initialized it; this module never imports it."""
    ray = cast("Any", sys.modules.get("ray"))
    return ray if ray is not None and ray.is_initialized() else None


def find(timeout_s: float) -> str:
    """The announcement of a plane; "" if there is none.

    Raises:
        PlaneTimeout: the actor did not answer within `timeout_s` seconds.
        ConfigError: the actor belongs to TransferQueue itself.
    """
    ray = _ray()
    if ray is None:
        return ""
    try:
        actor = ray.get_actor(_NAME, namespace=_NAMESPACE)
        if not hasattr(actor, "read"):
            raise ConfigError(
                f"The Ray cluster has an actor {_NAME!r} of TransferQueue itself; close that plane, or use another cluster."
            )
        return _read(ray, actor, timeout_s)
    except (ValueError, ray.exceptions.RayActorError):
        return ""


def _read(ray: Any, actor: Any, timeout_s: float) -> str:
    try:
        return str(ray.get(actor.read.remote(), timeout=timeout_s))
    except ray.exceptions.GetTimeoutError as error:
        raise PlaneTimeout(
            f"The Ray actor {_NAME!r}, which announces the plane, did not answer within {timeout_s:g} s; raise "
            "rl_transferqueue.timeout_s, or check that the cluster can run it."
        ) from error


class Notice:
    """Keeps this process's announcement; the actor ends with it, or with this process."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def withdraw(self) -> None:
        """End the actor."""
        ray = _ray()
        if ray is not None and self._actor is not None:
            ray.kill(self._actor)


def announce(text: str, conf: Any, timeout_s: float) -> Notice | None:
    """Announce a plane; None if another process has announced one.

    Args:
        text: the announcement.
        conf: what the actor's `get_config` returns.
        timeout_s: seconds for the actor to start.

    Raises:
        PlaneTimeout: the actor did not start in time.
    """
    ray = _ray()
    if ray is None:
        return Notice(None)
    try:
        actor = ray.remote(num_cpus=0)(_Announcer).options(name=_NAME, namespace=_NAMESPACE).remote(text, conf)
    except ValueError:
        return None
    notice = Notice(actor)
    try:
        _read(ray, actor, timeout_s)  # from now on other processes find it
    except PlaneTimeout:
        notice.withdraw()
        raise
    return notice
