"""Which code of installed packages may run, and how it is loaded: the same on the driver and in every worker.

A plug-in is an entry point of an installed distribution. The settings of a run name it; whether it may load says the operator of the host, in one
file for all packages of the stack, which the environment variable RL_PLUGINS names:

    [rl_trainer.hooks.stopwatch]       # group and name of the entry point
    distribution = "my-package"
    version = "1.2.0"                  # optional: exactly this one
    sha256 = "..."                     # optional: of the installed files, as `python -m rl_protocol.plugins rl_trainer` prints it

Nothing of a plug-in is imported before all of that has been checked. A pin guards against files that were changed, not against a bad author; while a
pinned plug-in loads, byte code beside its sources is not used. What the stack itself offers as entry points needs nobody's leave.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec

from rl_protocol.errors import UNREADABLE, ConfigError

ALLOW_FILE = "RL_PLUGINS"
STACK = frozenset(
    {"rl-app-ppo", "rl-ckpt-engine", "rl-megatron-peft", "rl-rollout-vllm", "rl-trainer", "rl-transferqueue"}
)
"""Distributions that are no plug-ins."""
_NOT_HASHED = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"}
"""Written by installers, different on every machine."""


class Allowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One plug-in that may load."""

    distribution: str
    version: str = ""
    """Empty: any."""
    sha256: str = ""
    """See `fingerprint`; empty: not pinned."""


AllowList = dict[str, dict[str, dict[str, Allowed]]]
"""The two parts of the group's name, and the name of the entry point -> what may load. Can be sent to processes elsewhere."""


def read_allow_list(environment: Mapping[str, str] = os.environ) -> AllowList:
    """What the TOML file in RL_PLUGINS says; nothing is allowed when that is not set.

    Raises:
        ConfigError: the file can't be read, others may write it, or it says something unknown.
    """
    name = environment.get(ALLOW_FILE, "")
    if not name:
        return {}
    try:
        mode, data = Path(name).stat().st_mode, Path(name).read_bytes()
        found = msgspec.toml.decode(data, type=AllowList)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{ALLOW_FILE}: {name} can't be read: {error}.") from error
    if mode & 0o002:
        raise ConfigError(f"{ALLOW_FILE}: everybody may write {name}; run chmod o-w {name}.")
    return found


def check_installed(point: metadata.EntryPoint, environment: Mapping[str, str] = os.environ) -> bool:
    """Check that RL_PLUGINS allows it, or that it is of the stack; nothing is imported. Returns whether it is pinned by its files.

    Raises:
        ConfigError: as `check` and `read_allow_list`.
    """
    return check(point, read_allow_list(environment))


def load_installed(point: metadata.EntryPoint, environment: Mapping[str, str] = os.environ) -> object:
    """What it offers, if RL_PLUGINS allows it.

    Raises:
        ConfigError: as `check` and `load`.
    """
    return load(point, pinned=check_installed(point, environment))


def check(point: metadata.EntryPoint, listed: AllowList) -> bool:
    """Check an entry point against its entry in an allow-list; nothing is imported. Returns whether it is pinned by its files.

    Raises:
        ConfigError: it is not allowed, or its distribution or version or files are not those allowed. Says which, what was found, and what to do.
    """
    dist, what = point.dist, f"The plug-in {point.name!r} ({owner(point)})"
    if dist is not None and _canonical(dist.name) in STACK:
        return False
    package, _, kind = point.group.partition(".")
    allowed = listed.get(package, {}).get(kind, {}).get(point.name)
    if allowed is None or dist is None:
        quoted = f'"{point.name}"' if "." in point.name or ":" in point.name else point.name
        raise ConfigError(
            f"{what} is installed but not allowed. If you trust it, let the file that {ALLOW_FILE} names say "
            f'[{point.group}.{quoted}] distribution = "{dist.name if dist is not None else "..."}".'
        )
    if not same_distribution(dist.name, allowed.distribution):
        raise ConfigError(
            f"{what} comes from another distribution than allowed: {allowed.distribution!r} was to offer it, {dist.name!r} does. "
            "Uninstall that one or change the allow-list."
        )
    if allowed.version and dist.version != allowed.version:
        raise ConfigError(
            f"{what} has version {dist.version}; allowed is {allowed.version}. Install that one or change the allow-list."
        )
    if allowed.sha256:
        _check_files(what, point, dist, allowed.sha256)
    return bool(allowed.sha256)


def load(point: metadata.EntryPoint, *, pinned: bool) -> object:
    """Import what has been checked.

    Raises:
        ConfigError: it can't be imported.
    """
    try:
        with _without_byte_code() if pinned else nullcontext():
            return point.load()
    except (ImportError, AttributeError, OSError) as error:  # OSError: a shared library
        raise ConfigError(
            f"The plug-in {point.name!r} ({owner(point)}) can't be loaded: {error}. Install what it needs."
        ) from error


def owner(point: metadata.EntryPoint) -> str:
    """Of an entry point, for messages."""
    return f"{point.value} of " + (
        f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown distribution"
    )


def fingerprint(distribution: metadata.Distribution) -> str:
    """SHA-256 over names and contents of the installed files, in hex; byte code and what installers write are left out.

    Raises:
        ConfigError: the files are not known, or are elsewhere (an editable install).
    """
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    if distribution.files is None or direct.get("dir_info", {}).get("editable"):
        raise ConfigError(
            f"The files of {distribution.name} can't be pinned, it is installed without a list of them or in editable mode; install a wheel."
        )
    total = hashlib.sha256()
    for file in sorted(distribution.files, key=str):
        if file.name in _NOT_HASHED or file.suffix == ".pyc":
            continue
        path = Path(str(file.locate()))
        try:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"The file {path} of {distribution.name} can't be read: {error}.") from error
        total.update(f"{file}\0{content}\n".encode())
    return total.hexdigest()


def listing(points: Iterable[metadata.EntryPoint]) -> str:
    """An allow-list of these entry points, pinned: for an operator to read and shorten."""
    entries: list[str] = []
    for point in points:
        assert point.dist is not None, "entry points of installed packages know their distribution"
        try:
            pin = f'sha256 = "{fingerprint(point.dist)}"\n'
        except ConfigError as error:
            pin = f"# {error}\n"
        entries.append(
            f'[{point.group}.{point.name}]\ndistribution = "{point.dist.name}"\nversion = "{point.dist.version}"\n{pin}\n'
        )
    return "".join(entries)


def _check_files(what: str, point: metadata.EntryPoint, dist: metadata.Distribution, sha256: str) -> None:
    found = fingerprint(dist)
    if found != sha256.lower():
        raise ConfigError(
            f"{what} was changed on disk, or is another build: its files have sha256 {found}, allowed is {sha256}. Install it anew, or look at "
            "what changed and pin the new value."
        )
    spec = find_spec(point.module.partition(".")[0])
    files = {Path(str(file.locate())).resolve() for file in dist.files or ()}
    if spec is None or spec.origin is None or Path(spec.origin).resolve() not in files:
        where = None if spec is None else spec.origin
        raise ConfigError(
            f"{what} is pinned, but its module would be imported from {where}, which is none of its files."
        )


def same_distribution(one: str, other: str) -> bool:
    """Whether two names are of one distribution; case, `-`, `_` and `.` do not matter."""
    return _canonical(one) == _canonical(other)


def _canonical(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")


@contextmanager
def _without_byte_code() -> Generator[None]:
    """Imports look for byte code in an empty folder: that beside the sources is not covered by the pin."""
    before = sys.pycache_prefix
    with tempfile.TemporaryDirectory() as empty:
        sys.pycache_prefix = empty
        try:
            yield
        finally:
            sys.pycache_prefix = before


def main() -> None:
    """Print an allow-list of what is installed for the packages that the arguments name, such as rl_trainer and rl_app_ppo."""
    groups = [group for group in metadata.entry_points().groups if group.partition(".")[0] in sys.argv[1:]]
    sys.stdout.write(listing(point for group in sorted(groups) for point in metadata.entry_points(group=group)))


if __name__ == "__main__":
    main()
