"""Program that the raylet runs for each worker: has `worker_template` fork the process.

Arguments: SOCKET, and path and arguments of Ray's worker program. If the template has ended, this
process becomes the worker, and ends with the raylet: the template may have ended because the driver
has, and a worker that is still starting would notice that half a minute late. Standard library
only, since it runs in front of every worker.
"""

import json
import os
import signal
import socket
import struct
import sys

LENGTH = struct.Struct("<I")
STANDARD = (0, 1, 2)
"""Descriptors that the worker takes over."""
_PR_SET_PDEATHSIG = 1
_SETUP = ("--language=", "--serialized-runtime-env-context=")
"""Options of the program that Ray runs in front of its worker program."""


def main(address: str, *arguments: str) -> None:
    """Send the command, the environment and the standard descriptors; wait for the fork."""
    command = [argument for argument in arguments if not argument.startswith(_SETUP)]
    request = json.dumps({"command": command, "environment": dict(os.environ)}).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as template:
            template.connect(address)
            socket.send_fds(template, [LENGTH.pack(len(request))], STANDARD)
            template.sendall(request)
            forked = bool(template.recv(1))
    except OSError:
        forked = False
    if not forked:
        _end_with_raylet()
        os.execv(sys.executable, [sys.executable, *command])


def _end_with_raylet() -> None:
    """Have the kernel kill this process when its parent, the raylet, ends; only Linux can."""
    if sys.platform == "linux":
        import ctypes  # takes longer than all else here, and is seldom needed

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with open(f"/proc/{os.getppid()}/comm", encoding="utf-8") as name:  # noqa: PTH123 - no pathlib here
            if name.read() != "raylet\n":  # it has ended already, and another process is the parent
                sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
