"""Load engine and manager plug-ins that the operator allows.

A plug-in is an entry point of an installed distribution in group `rl_ckpt_engine.backends` or
`rl_ckpt_engine.managers`. The settings of a run name it; the operator allows it in the file named
by RL_PLUGINS (for the checks see `rl_protocol.support.plugins`):

    [rl_ckpt_engine.backends.my_engine]
    distribution = "my-package"

As in verl's settings, a plug-in can also be a module path into an installed distribution:
`my_pkg.engines`, a module that registers its engines (`CheckpointEngineRegistry.register`), or
`my_pkg.managers.Manager`. The file allows it under that path:

    [rl_ckpt_engine.backends."my_pkg.engines"]
    distribution = "my-package"

A file `path.py:Class` loads if the user allows it (`rl_protocol.support.trusted_files`).

Any other path loads only with `allow_unsafe_plugins`: an argument for the command line, not a
setting.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib import metadata
from typing import Literal, TypeAlias

import msgspec

from rl_protocol.errors import ConfigError
from rl_protocol.support.plugins import (
    ALLOW_FILE,
    AllowList,
    check,
    installed_plugins,
    load,
    owner,
    read_allow_list,
    same_distribution,
)
from rl_protocol.support.trusted_files import load_object, names_file

PluginKind: TypeAlias = Literal["backends", "managers"]
_PACKAGE = "rl_ckpt_engine"
_SETTING: Mapping[PluginKind, str] = {
    "backends": "CheckpointEngineConfig.custom_backend_module",
    "managers": "CheckpointEngineConfig.checkpoint_manager_class",
}
"""The setting that names a plug-in of that kind."""
_log = logging.getLogger(__name__)


class PluginPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which plug-ins may load. The driver reads it once and sends it to its workers."""

    allowed: AllowList = {}
    allow_unsafe_plugins: bool = False


def load_policy(environment: Mapping[str, str] = os.environ, *, allow_unsafe_plugins: bool = False) -> PluginPolicy:
    """Read the policy from the file named by RL_PLUGINS; nothing is allowed if it is not set.

    Raises:
        ConfigError: the file can't be read, is world-writable, or has an unknown key.
    """
    listed = read_allow_list(environment)
    own = {package: listed[package] for package in (_PACKAGE,) if package in listed}
    return PluginPolicy(allowed=own, allow_unsafe_plugins=allow_unsafe_plugins)


def load_plugin(kind: PluginKind, name: str, policy: PluginPolicy) -> object:
    """Load a plug-in; the caller checks the result.

    Args:
        kind: kind of the plug-in.
        name: name of an entry point, or a path: `package.module` for engines,
            `package.module.Class` for a manager, `module:Class` or `path.py:Class` for either.
        policy: which plug-ins may load.

    Raises:
        ConfigError: there are no or several plug-ins of that name, it is not allowed, its
            distribution, version or files differ from the allowed ones, or it can't be imported.
    """
    if names_file(name):
        return load_object(name, _SETTING[kind])
    if ":" in name or "." in name:
        return _load_path(kind, name, policy)
    points = entry_points(kind, name)
    if not points:
        installed = sorted(plugin_names(kind))
        raise ConfigError(
            f"No installed package offers {name!r} in group {_group(kind)}; installed are {', '.join(installed) or 'none'}. Install the "
            "package on the driver and on all workers."
        )
    if len(points) > 1:
        owners = ", ".join(owner(point) for point in points)
        raise ConfigError(f"Several packages offer {name!r} in group {_group(kind)}: {owners}. Uninstall all but one.")
    (point,) = points
    return load(point, pinned=check(point, policy.allowed))


def entry_points(kind: PluginKind, name: str) -> list[metadata.EntryPoint]:
    """Entry points of that name; imports nothing."""
    return list(installed_plugins(_group(kind)).select(name=name))


def plugin_names(kind: PluginKind) -> set[str]:
    """Names offered by installed packages, allowed or not; imports nothing."""
    return {point.name for point in installed_plugins(_group(kind))}


def _load_path(kind: PluginKind, path: str, policy: PluginPolicy) -> object:
    """Load code of an installed, allowed distribution, or any code with allow_unsafe_plugins."""
    value = path if kind == "backends" or ":" in path else ":".join(path.rsplit(".", 1))
    point = metadata.EntryPoint(path, value, _group(kind))
    listed = policy.allowed.get(_PACKAGE, {}).get(kind, {}).get(path)
    if listed is None and policy.allow_unsafe_plugins:
        _log.warning(
            "UNSAFE: importing %s from a module path named in the settings, unchecked (allow_unsafe_plugins).", path
        )
        return load(point, pinned=False)
    owners = metadata.packages_distributions().get(point.module.partition(".")[0], [])
    if not owners:
        raise ConfigError(
            f"{path!r} is a module path, and no installed distribution contains that module; such code loads only with allow_unsafe_plugins on "
            f"the command line. Better: install a package that contains it as a wheel, and allow it in the file named by {ALLOW_FILE}."
        )
    names = [owner for owner in owners if listed is not None and same_distribution(owner, listed.distribution)]
    vars(point).update(dist=metadata.distribution((names or owners)[0]))
    return load(point, pinned=check(point, policy.allowed))


def _group(kind: PluginKind) -> str:
    return f"{_PACKAGE}.{kind}"
