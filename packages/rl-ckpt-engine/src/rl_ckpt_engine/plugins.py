"""Which code of others may run as an engine or as the manager, and how it is loaded: the same on the driver and in every worker.

A plug-in is an entry point of an installed distribution, in group `rl_ckpt_engine.backends` or `rl_ckpt_engine.managers`. The settings of a run
name it; whether it may load says the operator, in the file that RL_PLUGINS names (`rl_protocol.plugins`, which also says how it is checked):

    [rl_ckpt_engine.backends.my_engine]
    distribution = "my-package"

A module path, as verl's settings have it, names code of an installed distribution without entry points: `my_pkg.engines`, a module that registers
its engines (`CheckpointEngineRegistry.register`), or `my_pkg.managers.Manager`. The file allows it under that path:

    [rl_ckpt_engine.backends."my_pkg.engines"]
    distribution = "my-package"

Any other path loads only with `allow_unsafe_plugins`, which is an argument and no setting: it belongs on the command line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib import metadata
from typing import Literal, TypeAlias

import msgspec

from rl_protocol.errors import ConfigError
from rl_protocol.plugins import ALLOW_FILE, AllowList, check, load, owner, read_allow_list, same_distribution

PluginKind: TypeAlias = Literal["backends", "managers"]
_PACKAGE = "rl_ckpt_engine"
_log = logging.getLogger(__name__)


class PluginPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may load. The driver reads it once and hands it to its workers."""

    allowed: AllowList = {}
    allow_unsafe_plugins: bool = False


def load_policy(environment: Mapping[str, str] = os.environ, *, allow_unsafe_plugins: bool = False) -> PluginPolicy:
    """What the operator allows; nothing when RL_PLUGINS is not set.

    Raises:
        ConfigError: the file can't be read, others may write it, or it says something unknown.
    """
    listed = read_allow_list(environment)
    own = {package: listed[package] for package in (_PACKAGE,) if package in listed}
    return PluginPolicy(allowed=own, allow_unsafe_plugins=allow_unsafe_plugins)


def load_plugin(kind: PluginKind, name: str, policy: PluginPolicy) -> object:
    """What the plug-in offers, not checked any further.

    Args:
        kind: of the plug-in.
        name: of an entry point; or a path: `package.module` of engines, `package.module.Class` of a manager, `module:Class` of either.
        policy: what may load.

    Raises:
        ConfigError: nobody offers the name, several do, it is not allowed, its distribution or version or files are not those allowed, or it
            can't be imported. Says which, what was found, and what to do.
    """
    if ":" in name or "." in name:
        return _load_path(kind, name, policy)
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
    return load(point, pinned=check(point, policy.allowed))


def entry_points(kind: PluginKind, name: str) -> list[metadata.EntryPoint]:
    """Those of that name; nothing is imported."""
    return list(metadata.entry_points(group=_group(kind), name=name))


def plugin_names(kind: PluginKind) -> set[str]:
    """Names that installed packages offer, allowed or not; nothing is imported."""
    return {point.name for point in metadata.entry_points(group=_group(kind))}


def _load_path(kind: PluginKind, path: str, policy: PluginPolicy) -> object:
    """Code of an installed distribution that the allow-list names, or any code with allow_unsafe_plugins."""
    value = path if kind == "backends" or ":" in path else ":".join(path.rsplit(".", 1))
    point = metadata.EntryPoint(path, value, _group(kind))
    listed = policy.allowed.get(_PACKAGE, {}).get(kind, {}).get(path)
    owners = metadata.packages_distributions().get(point.module.partition(".")[0], [])
    if listed is None and policy.allow_unsafe_plugins:
        _log.warning(
            "UNSAFE: importing %s from a module path named in the settings, unchecked (allow_unsafe_plugins).", path
        )
        return load(point, pinned=False)
    if not owners:
        raise ConfigError(
            f"{path!r} is a module path, and no installed distribution holds that module; such code loads only with allow_unsafe_plugins, given on "
            f"the command line. Better: install a package with it as a wheel, and allow it in the file that {ALLOW_FILE} names."
        )
    names = [owner for owner in owners if listed is not None and same_distribution(owner, listed.distribution)]
    vars(point).update(dist=metadata.distribution((names or owners)[0]))
    return load(point, pinned=check(point, policy.allowed))


def _group(kind: PluginKind) -> str:
    return f"{_PACKAGE}.{kind}"
