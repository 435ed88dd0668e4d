"""vLLM plugin: the processes of a rollout engine end with the process that started it.

The package registers `end_with_parent_process` as an entry point of the group
`vllm.general_plugins`, whose functions vLLM calls early in each of its processes: before it loads a
model, and so before it allocates the memory of a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

from rl_protocol.support.host.this_process import end_with_parent
from rl_rollout_vllm.config import CLIENT_VARIABLE


def end_with_parent_process() -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL.

    The engine's process is a child of the client, its workers are children of the engine's process.
    Otherwise they would outlive a client that is killed, and keep their memory.
    """
    client, parent = os.environ.get(CLIENT_VARIABLE), multiprocessing.parent_process()
    if client is None or int(client) == os.getpid() or parent is None:
        return
    end_with_parent()
    if not parent.is_alive():  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
