"""Which code of others may run as an engine or as the manager, and how it is loaded: the same on the driver and in every worker.

A plug-in is an entry point of an installed distribution, in group `rl_ckpt_engine.backends` or `rl_ckpt_engine.managers`. The settings of a run
name it; whether it may load says the operator, in a file that the environment variable RL_CKPT_PLUGINS names:

    [backends.my_engine]               # name of the entry point
    distribution = "my-package"
    version = "1.2.0"                  # optional: exactly this one
    sha256 = "..."                     # optional: of the installed files, as `python -m rl_ckpt_engine.plugins` prints it

What the entries mean and how they are checked is said in `rl_protocol.plugins`. Module paths load only with `allow_unsafe_plugins`, which is an
argument and no setting: it belongs on the command line.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Literal, TypeAlias

import msgspec

from rl_protocol.errors import ConfigError
from rl_protocol.plugins import Allowed, check, fingerprint, listing, load, owner, read_allow_file

__all__ = [
    "ALLOW_FILE",
    "Allowed",
    "PluginKind",
    "PluginPolicy",
    "entry_points",
    "fingerprint",
    "load_plugin",
    "load_policy",
    "owner",
    "plugin_names",
]

ALLOW_FILE = "RL_CKPT_PLUGINS"
PluginKind: TypeAlias = Literal["backends", "managers"]
_log = logging.getLogger(__name__)


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
    policy = read_allow_file(ALLOW_FILE, PluginPolicy, environment) or PluginPolicy()
    if policy.allow_unsafe_plugins:
        raise ConfigError(
            f"{ALLOW_FILE}: allow_unsafe_plugins can't be set in {environment[ALLOW_FILE]}; it belongs on the command line."
        )
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
    allowed: dict[str, Allowed] = getattr(policy, kind)
    return load(point, pinned=check(point, allowed.get(point.name), variable=ALLOW_FILE, table=kind))


def entry_points(kind: PluginKind, name: str) -> list[metadata.EntryPoint]:
    """Those of that name; nothing is imported."""
    return list(metadata.entry_points(group=_group(kind), name=name))


def plugin_names(kind: PluginKind) -> set[str]:
    """Names that installed packages offer, allowed or not; nothing is imported."""
    return {point.name for point in metadata.entry_points(group=_group(kind))}


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


def main() -> None:
    """Print an allow-list of all installed plug-ins, pinned, for an operator to read and shorten."""
    kinds: tuple[PluginKind, ...] = ("backends", "managers")
    points = [(kind, point) for kind in kinds for point in metadata.entry_points(group=_group(kind))]
    sys.stdout.write(listing(points))


if __name__ == "__main__":
    main()
