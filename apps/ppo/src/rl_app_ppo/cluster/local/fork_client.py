"""Program that the raylet runs for each worker: has `worker_template` fork the process.

Arguments: SOCKET, and path and arguments of Ray's worker program. If the template has ended, this
process becomes the worker. Standard library only, since it runs in front of every worker.
"""

import json
import os
import socket
import struct
import sys

LENGTH = struct.Struct("<I")
STANDARD = (0, 1, 2)
"""Descriptors that the worker takes over."""
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
        os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main(*sys.argv[1:])
