"""Finds a running plane through its descriptor file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rl_protocol.errors import ConfigError, PlaneLostError, WireError
from rl_transferqueue.wire.descriptor import DESCRIPTOR_FILE, RUNTIME_PREFIX, PlaneDescriptor
from rl_transferqueue.wire.process_liveness import identify

DESCRIPTOR_VARIABLE = "RL_TQ_DESCRIPTOR"
"""Environment variable with the path of a descriptor."""


def find_plane(path: Path | None = None, environment: Mapping[str, str] | None = None) -> PlaneDescriptor:
    """Find a plane: by `path`, by RL_TQ_DESCRIPTOR, or the only one of this user on this host.

    Raises:
        ConfigError: the file is missing or no descriptor; no plane runs here, or more than one.
    """
    named = (os.environ if environment is None else environment).get(DESCRIPTOR_VARIABLE)
    if path is not None or named:
        return _load(path or Path(str(named)))
    running = running_planes()
    if len(running) == 1:
        return next(iter(running.values()))
    how = f"Name its descriptor: --descriptor PATH, or {DESCRIPTOR_VARIABLE}."
    if not running:
        raise ConfigError(f"No plane of this user runs on this host (looked in {tempfile.gettempdir()}). {how}")
    raise ConfigError(f"{len(running)} planes run on this host: {', '.join(map(str, running))}. {how}")


def running_planes() -> dict[Path, PlaneDescriptor]:
    """Running planes of this user whose runtime directory is in the temporary directory."""
    out: dict[Path, PlaneDescriptor] = {}
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{RUNTIME_PREFIX}*/{DESCRIPTOR_FILE}")):
        try:
            descriptor = _load(path)
            alive = identify(descriptor.controller.process.pid) == descriptor.controller.process
        except (ConfigError, PlaneLostError):
            continue  # of another user, going away, or left behind by a process that was killed
        if alive:
            out[path] = descriptor
    return out


def _load(path: Path) -> PlaneDescriptor:
    try:
        return PlaneDescriptor.from_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"The descriptor {path} can't be read: {error.strerror}.") from error
    except WireError as error:
        raise ConfigError(f"{path}: {error}") from error
