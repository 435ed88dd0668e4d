"""Which code of others may run as an engine or as the manager, and how it is loaded: the same on the driver and in every worker.

A plug-in is an entry point of an installed distribution, in group `rl_ckpt_engine.backends` or `rl_ckpt_engine.managers`. The settings of a run
name it; whether it may load says the operator, in a file that the environment variable RL_CKPT_PLUGINS names:

    [backends.my_engine]               # name of the entry point
    distribution = "my-package"
    version = "1.2.0"                  # optional: exactly this one
    sha256 = "..."                     # optional: of the installed files, as `python -m rl_ckpt_engine.plugins` prints it

* Nothing of a plug-in is imported before all of that has been checked. A pin guards against files that were changed, not against a bad author;
  while a pinned plug-in loads, byte code beside its sources is not used.
* Module paths load only with `allow_unsafe_plugins`, which is an argument and no setting: it belongs on the command line.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from rl_protocol.errors import UNREADABLE, ConfigError

ALLOW_FILE = "RL_CKPT_PLUGINS"
PluginKind: TypeAlias = Literal["backends", "managers"]
_log = logging.getLogger(__name__)
_NOT_HASHED = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"}
"""Written by installers, different on every machine."""


class Allowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One plug-in that may load."""

    distribution: str
    version: str = ""
    """Empty: any."""
    sha256: str = ""
    """See `fingerprint`; empty: not pinned."""


class PluginPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may load, by name of the entry point. The driver reads it once and hands it to its workers."""

    backends: dict[str, Allowed] = {}
    managers: dict[str, Allowed] = {}
    allow_unsafe_plugins: bool = False


def load_policy(environment: Mapping[str, str] = os.environ, *, allow_unsafe_plugins: bool = False) -> PluginPolicy:
    """What the operator allows; nothing when RL_CKPT_PLUGINS is not set.

    Raises:
        ConfigError: the file can't be read, others may write it, or it says something unknown.
    """
    name = environment.get(ALLOW_FILE, "")
    if not name:
        return PluginPolicy(allow_unsafe_plugins=allow_unsafe_plugins)
    try:
        mode, data = Path(name).stat().st_mode, Path(name).read_bytes()
        policy = msgspec.toml.decode(data, type=PluginPolicy)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{ALLOW_FILE}: {name} can't be read: {error}.") from error
    if mode & 0o002:
        raise ConfigError(f"{ALLOW_FILE}: everybody may write {name}; run chmod o-w {name}.")
    if policy.allow_unsafe_plugins:
        raise ConfigError(f"{ALLOW_FILE}: allow_unsafe_plugins can't be set in {name}; it belongs on the command line.")
    return msgspec.structs.replace(policy, allow_unsafe_plugins=allow_unsafe_plugins)


def load_plugin(kind: PluginKind, name: str, policy: PluginPolicy) -> object:
    """What the plug-in offers, not checked any further.

    Args:
        kind: of the plug-in.
        name: of an entry point; or `module:Class` with allow_unsafe_plugins.
        policy: what may load.

    Raises:
        ConfigError: nobody offers the name, several do, it is not allowed, its distribution or version or files are not those allowed, or it
            can't be imported. Says which, what was found, and what to do.
    """
    if ":" in name:
        return _load_unsafe(kind, name, policy)
    points = entry_points(kind, name)
    if not points:
        installed = sorted(point.name for point in metadata.entry_points(group=_group(kind)))
        raise ConfigError(
            f"No installed package offers {name!r} in group {_group(kind)}; installed are {', '.join(installed) or 'none'}. Install the one "
            "that does, on the driver and wherever workers run."
        )
    if len(points) > 1:
        owners = ", ".join(owner(point) for point in points)
        raise ConfigError(f"Several packages offer {name!r} in group {_group(kind)}: {owners}. Uninstall all but one.")
    (point,) = points
    pinned = _check_allowed(kind, point, policy)
    try:
        with _without_byte_code() if pinned else _nothing():
            return point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The plug-in {name!r} ({owner(point)}) can't be loaded: {error}. Install what it needs."
        ) from error


def entry_points(kind: PluginKind, name: str) -> list[metadata.EntryPoint]:
    """Those of that name; nothing is imported."""
    return list(metadata.entry_points(group=_group(kind), name=name))


def plugin_names(kind: PluginKind) -> set[str]:
    """Names that installed packages offer, allowed or not; nothing is imported."""
    return {point.name for point in metadata.entry_points(group=_group(kind))}


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


def _check_allowed(kind: PluginKind, point: metadata.EntryPoint, policy: PluginPolicy) -> bool:
    """Whether it is pinned by its files."""
    allowed: dict[str, Allowed] = getattr(policy, kind)
    entry, dist, what = allowed.get(point.name), point.dist, f"The plug-in {point.name!r} ({owner(point)})"
    if entry is None or dist is None:
        raise ConfigError(
            f"{what} is installed but not allowed. If you trust it, let the file that {ALLOW_FILE} names say "
            f'[{kind}.{point.name}] distribution = "{dist.name if dist is not None else "..."}".'
        )
    if _canonical(dist.name) != _canonical(entry.distribution):
        raise ConfigError(
            f"{what} comes from another distribution than allowed: {entry.distribution!r} was to offer it, {dist.name!r} does. "
            "Uninstall that one or change the allow-list."
        )
    if entry.version and dist.version != entry.version:
        raise ConfigError(
            f"{what} has version {dist.version}; allowed is {entry.version}. Install that one or change the allow-list."
        )
    if entry.sha256:
        _check_files(what, point, dist, entry.sha256)
    return bool(entry.sha256)


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


def _load_unsafe(kind: PluginKind, path: str, policy: PluginPolicy) -> object:
    if not policy.allow_unsafe_plugins:
        raise ConfigError(
            f"{path!r} is a module path; such code loads only with allow_unsafe_plugins, given on the command line. Better: install a package "
            f"that offers it as an entry point in group {_group(kind)}, and set its name."
        )
    _log.warning(
        "UNSAFE: importing %s from a module path named in the settings, unchecked (allow_unsafe_plugins).", path
    )
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path!r} can't be loaded: {error}.") from error


def _group(kind: PluginKind) -> str:
    return f"rl_ckpt_engine.{kind}"


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


@contextmanager
def _nothing() -> Generator[None]:
    yield


def main() -> None:
    """Print an allow-list of all installed plug-ins, pinned, for an operator to read and shorten."""
    kinds: tuple[PluginKind, ...] = ("backends", "managers")
    for kind in kinds:
        for point in metadata.entry_points(group=_group(kind)):
            assert point.dist is not None, "entry points of installed packages know their distribution"
            try:
                pin = f'sha256 = "{fingerprint(point.dist)}"\n'
            except ConfigError as error:
                pin = f"# {error}\n"
            sys.stdout.write(
                f'[{kind}.{point.name}]\ndistribution = "{point.dist.name}"\nversion = "{point.dist.version}"\n{pin}\n'
            )


if __name__ == "__main__":
    main()
