"""Program that stands in for Ray's dashboard agent and runtime environment agent.

The raylet starts both, and serves no driver until they have written their ports. A run uses
neither, and Ray's own take two seconds of CPU time at the start.
"""

import os
import select
import sys
from pathlib import Path

NO_PORT = "-1"
"""What Ray's agents write for a service that they do not offer."""


def main(session: str, node: str, *services: str) -> None:
    """Write the port of each service in the session's folder; end when the raylet has ended."""
    raylet = os.pidfd_open(os.getppid())
    for service in services:
        unfinished = Path(session, f"unfinished_{service}")
        unfinished.write_text(NO_PORT)
        unfinished.rename(Path(session, f"{service}_{node}"))
    if os.getppid() == int(os.environ["RAY_RAYLET_PID"]):  # else it ended before the pidfd was opened
        select.select([raylet], [], [])


if __name__ == "__main__":
    main(*sys.argv[1:])
