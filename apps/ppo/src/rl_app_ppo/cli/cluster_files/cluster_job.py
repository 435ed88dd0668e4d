"""What a run needs of a cluster, and the shell commands that all launch files share."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

_JOIN_S = 300

"""Seconds for the start of Ray on all hosts."""
AWAIT_HEAD = f"""\
until (exec 3<> "/dev/tcp/${{address%:*}}/${{address##*:}}") 2> /dev/null; do
  if ((SECONDS > {_JOIN_S})); then echo "error: no Ray at $address; see the output of ray start --head" >&2; exit 1; fi
  sleep 1
done"""
"""Commands for bash that wait for the head of Ray at $address; they fail if it does not come."""
_AWAIT_NODES = """\
import sys, time
import ray
address, nodes, limit = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
found = "no Ray"
while time.monotonic() < limit:
    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        found = f"no Ray ({error})"
    else:
        alive = sum(node["Alive"] for node in ray.nodes())
        if alive >= nodes:
            sys.exit(0)
        found = f"{alive} of {nodes} hosts"
    time.sleep(1)
sys.exit(f"error: {found} at {address} after {sys.argv[3]} s; the output of ray start says why the others did not join")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """What a run needs of a cluster."""

    name: str
    """Lower-case letters, digits and dashes."""
    words: tuple[str, ...]
    """Command line of the run, without ray.address."""
    output_dir: str
    """Parent of the run folders."""
    extras: tuple[str, ...]
    """Extras of this repository that it needs."""
    nodes: int
    """Hosts."""
    gpus: int
    """GPUs of each."""
    cpus: int
    """CPUs of each."""
    time: str
    """Limit, HH:MM:SS."""
    memory: int = 0
    """GiB of memory of each host; 0: what the cluster gives by default."""
    gpu_type: str = ""
    image: str = ""
    volume: str = ""

    @property
    def seconds(self) -> int:
        """The limit in seconds."""
        hours, minutes, seconds = map(int, self.time.split(":"))
        return 3600 * hours + 60 * minutes + seconds

    def sync(self, *groups: str) -> str:
        """Command that installs what the run needs, in the folder of this repository.

        Args:
            groups: dependency groups of the repository.
        """
        wanted = (*(f"--extra={extra}" for extra in self.extras), *(f"--group={group}" for group in groups))
        return shlex.join(["uv", "sync", "--locked", *wanted])

    def app(self, host: str) -> str:
        """Command of the run, quoted for a shell.

        With several hosts the data plane listens on the host of the driver.

        Args:
            host: its address, as a shell expands it between double quotes.
        """
        given = {word.partition("=")[0] for word in self.words}
        listens = self.nodes == 1 or "transfer_queue.listen" in given
        line = shlex.join(["uv", "run", "--no-sync", "apps/ppo", *self.words])
        return line if listens else f'{line} "transfer_queue.listen={host}"'

    def await_nodes(self, nodes: str) -> str:
        """Command that waits until so many hosts have joined the Ray at $address of this host.

        It fails if they do not in time.

        Args:
            nodes: their number, quoted for a shell.
        """
        return f"uv run --no-sync python - \"$address\" {nodes} {_JOIN_S} <<'PYTHON'\n{_AWAIT_NODES}PYTHON"
