"""Ends the ZeroMQ context of vLLM's client."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


async def terminate_context(context: Any) -> None:
    """End a ZeroMQ context, its I/O threads and file descriptors.

    vLLM leaves this to the garbage collector. The context waits for its sockets, which vLLM closes
    on this loop, so it is ended in a thread. If a socket stays open, the context lives until the
    process ends, which the daemon thread does not delay.
    """
    thread = threading.Thread(target=context.term, name="rl-rollout-vllm-zmq", daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, _TIMEOUT_S)
    if thread.is_alive():
        _log.warning("vLLM has not closed all of its sockets within %g s; their threads stay alive.", _TIMEOUT_S)
