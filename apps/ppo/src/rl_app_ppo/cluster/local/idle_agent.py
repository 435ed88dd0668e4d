"""Program that stands in for Ray's dashboard agent and runtime environment agent.

The raylet starts both, and serves no driver until they have written their ports. A run uses
neither, and Ray's own take two seconds of CPU time at the start.
"""

import os
import sys
import time
from pathlib import Path

NO_PORT = "-1"
"""What Ray's agents write for a service that they do not offer."""
EVERY_S = 0.5
"""How often it looks whether the raylet has ended."""


def main(session: str, node: str, *services: str) -> None:
    """Write the port of each service in the session's folder; end when the raylet has ended."""
    raylet = int(os.environ["RAY_RAYLET_PID"])
    for service in services:
        unfinished = Path(session, f"unfinished_{service}")
        unfinished.write_text(NO_PORT)
        unfinished.rename(Path(session, f"{service}_{node}"))
    while os.getppid() == raylet:
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
