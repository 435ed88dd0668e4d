"""Which code of others may run as an engine or as the manager, and how it is loaded: the same on the driver and in every worker.

A plug-in is an entry point of an installed distribution, in group `rl_ckpt_engine.backends` or `rl_ckpt_engine.managers`. The settings of a run
name it; whether it may load says the operator, in the file that RL_PLUGINS names (`rl_protocol.plugins`, which also says how it is checked):

    [rl_ckpt_engine.backends.my_engine]
    distribution = "my-package"

Module paths load only with `allow_unsafe_plugins`, which is an argument and no setting: it belongs on the command line.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from importlib import metadata
from typing import Literal, TypeAlias

import msgspec

from rl_protocol.errors import ConfigError
from rl_protocol.plugins import AllowList, check, load, owner, read_allow_list

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
    return load(point, pinned=check(point, policy.allowed))


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
    return f"{_PACKAGE}.{kind}"
