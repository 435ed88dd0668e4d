"""The throw-away environment with TRL, in the user's cache; made by uv, hard-linked from its cache.

Every package that TRL shares with this environment has this environment's version, torch first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

REQUIREMENT = "trl>=1.16"
FINISHED = "finished"


class NoTRLError(RuntimeError):
    """TRL can't be installed here."""


def trl_python(*, offline: bool) -> Path:
    """The interpreter of the environment, which is made if there is none for these versions.

    Args:
        offline: use only what is in uv's cache.

    Raises:
        NoTRLError: there is no uv, or it can't install TRL.
    """
    ours = sorted({f"{found.name}=={found.version}" for found in distributions() if not found.name.startswith("rl-")})
    digest = hashlib.sha256("\n".join([REQUIREMENT, sys.version, *ours]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rl-stack-benchmarks"
    folder = cache / f"trl-{digest}"
    python = folder / "bin" / "python"
    if (folder / FINISHED).exists():
        return python
    uv = shutil.which("uv")
    if uv is None:
        raise NoTRLError("there is no uv, which installs TRL")
    shutil.rmtree(folder, ignore_errors=True)
    cache.mkdir(parents=True, exist_ok=True)
    constraints = cache / f"trl-{digest}.txt"
    constraints.write_text("\n".join(ours), encoding="utf-8")
    more = ["--no-config", *(["--offline"] if offline else [])]
    _run(uv, "venv", "--python", sys.executable, *more, str(folder))
    _run(
        *(uv, "pip", "install", "--python", str(python), "--link-mode", "hardlink", "--compile-bytecode"),
        *("--constraints", str(constraints), *more, REQUIREMENT),
    )
    (folder / FINISHED).touch()
    return python


def _run(*command: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run([*command], capture_output=True, text=True, check=False, timeout=1800, env=env)
    if done.returncode:
        raise NoTRLError(f"{' '.join(command[:3])} failed: {done.stderr.strip()[-800:]}")
