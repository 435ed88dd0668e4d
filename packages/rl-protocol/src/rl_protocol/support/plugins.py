"""Check installed plug-ins against the operator's allow-list and load them.

A plug-in is an entry point of an installed distribution. The settings of a run name it. The
operator of the host allows it in one TOML file for all packages, named by the environment variable
RL_PLUGINS:

    [rl_trainer.hooks.stopwatch]       # group and name of the entry point
    distribution = "my-package"
    version = "1.2.0"                  # optional: exactly this one
    sha256 = "..."                     # optional: of the installed files

`python -m rl_protocol.support.plugins rl_trainer` prints such a file for all installed plug-ins of
rl_trainer.

A plug-in is imported only after these checks. A pin detects changed files, not a malicious author;
while a pinned plug-in loads, cached byte code is ignored. Entry points of the stack's own packages
are always allowed.
"""

from __future__ import annotations

import functools
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

from rl_protocol.errors import UNREADABLE, ConfigError, located_error

ALLOW_FILE = "RL_PLUGINS"
STACK = frozenset(
    {"rl-app-ppo", "rl-ckpt-engine", "rl-megatron-peft", "rl-rollout-vllm", "rl-trainer", "rl-transferqueue"}
)
"""The stack's own distributions, which need no entry in the allow-list.

A prefix such as "rl-" would let any distribution of that name skip the allow-list."""
_NOT_HASHED = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"}
"""Written by installers, different on every machine."""


class Allowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Entry of the allow-list: one plug-in that may load."""

    distribution: str
    version: str = ""
    """Empty: any."""
    sha256: str = ""
    """The `fingerprint` of the distribution; empty: not pinned."""


AllowList = dict[str, dict[str, dict[str, Allowed]]]
"""Package -> kind (the two parts of the group's name) -> name of the entry point -> entry. Can be
sent to other processes."""


def read_allow_list(environment: Mapping[str, str] = os.environ) -> AllowList:
    """Read the TOML file named by RL_PLUGINS; empty if the variable is not set.

    Raises:
        ConfigError: the file can't be read, is world-writable, or has an unknown key.
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
        raise ConfigError(f"{ALLOW_FILE}: {name} is world-writable; run chmod o-w {name}.")
    return found


def check_installed(point: metadata.EntryPoint, environment: Mapping[str, str] = os.environ) -> bool:
    """Check an entry point against the file in RL_PLUGINS, without importing it.

    Returns:
        Whether it is pinned by the sha256 of its files.

    Raises:
        ConfigError: see `check` and `read_allow_list`.
    """
    return check(point, read_allow_list(environment))


def load_installed(point: metadata.EntryPoint, environment: Mapping[str, str] = os.environ) -> object:
    """Check an entry point against the file in RL_PLUGINS and load it.

    Raises:
        ConfigError: see `check_installed` and `load`.
    """
    return load(point, pinned=check_installed(point, environment))


def check(point: metadata.EntryPoint, listed: AllowList) -> bool:
    """Check an entry point against an allow-list, without importing it.

    Returns:
        Whether it is pinned by the sha256 of its files.

    Raises:
        ConfigError: it is not allowed, or its distribution, version or files differ from the
            allowed ones.
    """
    dist, what = point.dist, f"The plug-in {point.name!r} ({owner(point)})"
    if dist is not None and _canonical(dist.name) in STACK:
        return False
    package, _, kind = point.group.partition(".")
    allowed = listed.get(package, {}).get(kind, {}).get(point.name)
    if allowed is None or dist is None:
        quoted = f'"{point.name}"' if "." in point.name or ":" in point.name else point.name
        raise ConfigError(
            f"{what} is installed but not allowed. If you trust it, add to the file named by {ALLOW_FILE}: "
            f'[{point.group}.{quoted}] distribution = "{dist.name if dist is not None else "..."}".'
        )
    if not same_distribution(dist.name, allowed.distribution):
        raise ConfigError(
            f"{what} comes from another distribution than allowed: expected {allowed.distribution!r}, got {dist.name!r}. "
            "Uninstall the latter or change the allow-list."
        )
    if allowed.version and dist.version != allowed.version:
        raise ConfigError(
            f"{what} has version {dist.version}; allowed is {allowed.version}. Install that version or change the allow-list."
        )
    if allowed.sha256:
        _check_files(what, point, dist, allowed.sha256)
    return bool(allowed.sha256)


def load(point: metadata.EntryPoint, *, pinned: bool) -> object:
    """Import a checked entry point.

    Raises:
        ConfigError: the import fails.
    """
    try:
        with _without_byte_code() if pinned else nullcontext():
            return point.load()
    except (Exception, SystemExit) as error:  # boundary to user code, which may raise anything
        missing = isinstance(error, ModuleNotFoundError | OSError)  # OSError: a shared library
        remedy = _missing(point) if missing else "Repair it, or install a version of it for this release."
        raise ConfigError(
            f"The plug-in {point.name!r} ({owner(point)}) can't be loaded: {located_error(error)}. {remedy}"
        ) from error


def _missing(point: metadata.EntryPoint) -> str:
    """What to do if a plug-in's dependencies are not there; an extra of its name installs them."""
    dist = point.dist
    if dist is None or point.name not in (dist.metadata.get_all("Provides-Extra") or ()):
        return "Install its dependencies."
    return f"Install {dist.name}[{point.name}]."


def installed_plugins(group: str) -> metadata.EntryPoints:
    """Entry points of installed packages in that group; imports none of them.

    The packages are read once per `sys.path`: that takes 30 ms with 150 of them.
    """
    return metadata.EntryPoints(point for point in _installed(tuple(sys.path)) if point.group == group)


@functools.lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> metadata.EntryPoints:
    del path
    found = metadata.entry_points()
    return metadata.EntryPoints(point for group in found.groups for point in found.select(group=group))


def owner(point: metadata.EntryPoint) -> str:
    """Value, distribution and version of an entry point, for messages."""
    return f"{point.value} of " + (
        f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown distribution"
    )


def fingerprint(distribution: metadata.Distribution) -> str:
    """SHA-256 in hex over names and contents of the installed files, without byte code and
    installer metadata.

    Raises:
        ConfigError: the list of files is unknown, or the install is editable.
    """
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    if distribution.files is None or direct.get("dir_info", {}).get("editable"):
        raise ConfigError(
            f"The files of {distribution.name} can't be pinned: it is installed without a file list or in editable mode. Install a wheel."
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
    """An allow-list with these entry points, pinned, as TOML for the operator to review."""
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
            f"{what} was changed on disk, or is another build: its files have sha256 {found}, allowed is {sha256}. Reinstall it, or review "
            "the change and pin the new value."
        )
    spec = find_spec(point.module.partition(".")[0])
    files = {Path(str(file.locate())).resolve() for file in dist.files or ()}
    if spec is None or spec.origin is None or Path(spec.origin).resolve() not in files:
        where = None if spec is None else spec.origin
        raise ConfigError(
            f"{what} is pinned, but its module would be imported from {where}, which is not one of its files."
        )


def same_distribution(one: str, other: str) -> bool:
    """Whether two names denote the same distribution; ignores case and the difference between `-`,
    `_` and `.`."""
    return _canonical(one) == _canonical(other)


def _canonical(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")


@contextmanager
def _without_byte_code() -> Generator[None]:
    """Redirect the byte-code cache to an empty folder: existing byte code is not covered by the
    pin."""
    before = sys.pycache_prefix
    with tempfile.TemporaryDirectory() as empty:
        sys.pycache_prefix = empty
        try:
            yield
        finally:
            sys.pycache_prefix = before


def main() -> None:
    """Print an allow-list of the installed plug-ins of the packages given as arguments, such as
    rl_trainer."""
    points = sorted(_installed(tuple(sys.path)), key=lambda point: point.group)
    sys.stdout.write(listing(point for point in points if point.group.partition(".")[0] in sys.argv[1:]))


if __name__ == "__main__":
    main()
