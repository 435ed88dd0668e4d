"""Finds and loads a reward function: from this package, an installed package or an allowed file.

Installed packages provide functions as entry points in the group `rl_trainer.rewards`; the file
that RL_PLUGINS names lists those that may be loaded (`rl_protocol.support.plugins`). A file,
`path.py:function`, is loaded only if the user allows it
(`rl_protocol.support.trusted_files`), so that a configuration from another person can't run
arbitrary files. Code from outside this package runs in separate processes with limits, and is not
sandboxed further.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any

from rl_protocol import ConfigError
from rl_protocol.errors import located_error
from rl_protocol.support.options import nearest
from rl_protocol.support.plugins import check_installed, installed_plugins, load_installed
from rl_protocol.support.trusted_files import check_object, find_object, load_object, written_literal, written_signature
from rl_trainer.rewards.functions import ARGUMENTS, BATCH_ARGUMENTS, misfit

ENTRY_POINTS = "rl_trainer.rewards"
KEY = "load_reward.name"
BUILT_IN: Mapping[str, str] = {
    "by_data_source": "rl_trainer.rewards.by_data_source:score",
    "countdown": "rl_trainer.rewards.countdown:score",
    "exact_match": "rl_trainer.rewards.functions:exact_match",
    "gsm8k": "rl_trainer.rewards.gsm8k:score",
    "gsm8k_flexible": "rl_trainer.rewards.gsm8k:score_flexible",
    "math": "rl_trainer.rewards.math:score",
}
HARMLESS = frozenset({"exact_match", "gsm8k", "gsm8k_flexible"})
"""Built-in functions that return quickly for any response; they need no separate process."""


def check_reward(name: str, environment: Mapping[str, str] = os.environ) -> None:
    """Check without importing it that the function exists, may be loaded, and takes the arguments
    of a reward function.

    Raises:
        ConfigError: says what is missing and what to do.
    """
    if ":" in name:
        check_object(name, KEY, environment)
        if kind := written_literal(name, KEY, environment):
            raise _not_callable(name, kind)
        if signature := written_signature(name, KEY, environment):
            _check_call(signature, name, environment)
    else:
        found = _find(name)
        if name not in BUILT_IN:
            check_installed(found, environment)


def _not_callable(name: str, kind: str) -> ConfigError:
    return ConfigError(f"{KEY}={name!r} must be callable; got {kind}.")


def _check_call(signature: inspect.Signature, name: str, environment: Mapping[str, str]) -> None:
    """Check that a function of this signature takes the arguments of a reward function."""
    if why := misfit(signature):
        place = find_object(name, KEY, environment) if ":" in name else ""
        raise ConfigError(
            f"{KEY}={name!r}: {place or 'it'} {why}. Give it the parameters ({', '.join(ARGUMENTS)}=None), or those of a batch, "
            f"({', '.join(BATCH_ARGUMENTS)})."
        )


def written_at(name: str) -> str:
    """The name, with file and line of a function of a file, `path.py:function`."""
    place = find_object(name, KEY) if ":" in name else ""
    return f"{name} ({place})" if place else name


def load_reward(name: str, environment: Mapping[str, str] = os.environ) -> Callable[..., Any]:
    """Import the function.

    Raises:
        ConfigError: as `check_reward`, also for a function whose parameters only running its file
            tells; or it can't be imported.
    """
    loaded = load_object(name, KEY, environment) if ":" in name else _load_named(name, environment)
    if not callable(loaded):
        raise _not_callable(name, type(loaded).__name__)
    _check_call(inspect.signature(loaded), name, environment)
    return loaded


def load_built_in(name: str) -> Callable[..., Any]:
    """Import a function of `BUILT_IN`."""
    return EntryPoint(name, BUILT_IN[name], ENTRY_POINTS).load()


def _load_named(name: str, environment: Mapping[str, str]) -> Any:
    """A built-in function, or one of an installed package."""
    found = _find(name)
    try:
        return found.load() if name in BUILT_IN else load_installed(found, environment)
    except ConfigError:
        raise
    except Exception as error:  # boundary to user code: importing it may raise anything
        raise ConfigError(f"{KEY}={name!r} can't be loaded: {located_error(error)}.") from error


def reward_names() -> list[str]:
    """The names of the built-in reward functions, and of those that installed packages offer."""
    return sorted({*BUILT_IN, *(entry.name for entry in installed_plugins(ENTRY_POINTS))})


def _find(name: str) -> EntryPoint:
    found = [EntryPoint(name, BUILT_IN[name], ENTRY_POINTS)] if name in BUILT_IN else []
    found += [entry for entry in installed_plugins(ENTRY_POINTS) if entry.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        where = ", ".join(entry.value for entry in found)
        raise ConfigError(
            f"{KEY}={name!r} is the name of several: {where}. Uninstall all but one, or rename the entry point in {ENTRY_POINTS!r}."
        )
    known = reward_names()
    raise ConfigError(
        f"{KEY}={name!r} is not known; known are {', '.join(known)}.{nearest(name, known)} Write path.py:function to use your own, "
        f"or install a package with an entry point in {ENTRY_POINTS!r}."
    )
