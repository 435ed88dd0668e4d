"""The names that an option may have as its value, from the registries that look them up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rl_app_ppo.config.full_keys import with_full_keys
from rl_app_ppo.config.loading import options
from rl_app_ppo.config.other_trainers import describe_other
from rl_app_ppo.config.presets import ALGORITHM, PRESET, algorithms, presets
from rl_app_ppo.config.rollout_engines import ROLLOUT_ENGINES
from rl_app_ppo.outputs.metric_sinks import CONSOLE, SINKS
from rl_ckpt_engine import CheckpointEngineRegistry
from rl_protocol.support.option_tree import Option
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl_trainer.algorithms.losses import POLICY_LOSSES
from rl_trainer.data.curriculum import CURRICULA
from rl_trainer.driver.hooks import HOOKS
from rl_trainer.rewards.loading import reward_names
from rl_trainer.rollout.agents import INTERACTIONS, TOOLS
from rl_trainer.rollout.session_kinds import SESSIONS
from rl_transferqueue.backends import backend_names

PLUGINS: Mapping[str, Callable[[], Iterable[str]]] = {
    "rl_trainer.advantage_estimators": ADVANTAGE_ESTIMATORS.names,
    "rl_trainer.policy_losses": POLICY_LOSSES.names,
    "rl_trainer.curricula": CURRICULA.names,
    "rl_trainer.hooks": HOOKS.names,
    "rl_trainer.rewards": reward_names,
    "rl_trainer.sessions": SESSIONS.names,
    "rl_trainer.tools": TOOLS.names,
    "rl_trainer.interactions": INTERACTIONS.names,
    "rl_app_ppo.rollout_engines": ROLLOUT_ENGINES.names,
    "rl_app_ppo.sinks": lambda: (CONSOLE, *SINKS.names()),
    "rl_ckpt_engine.backends": lambda: CheckpointEngineRegistry().names(),
    "rl_transferqueue.backends": backend_names,
}
"""Entry point group of an option (`plugins=`) -> the names that exist on this machine."""
LAYERS: Mapping[str, Callable[[], Iterable[str]]] = {f"{ALGORITHM}.name": algorithms, PRESET: presets}
"""Option that names a layer of settings -> the layers."""
_FREE_FORMS = ("rl_trainer.rewards", "rl_ckpt_engine.backends")
"""Groups of options that also have values of another form, such as a sum of rewards."""
_NO_FILES = ("rl_transferqueue.backends",)
"""Groups of options that take no file of code."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names that an option may have as its value."""

    known: tuple[str, ...]
    closed: bool
    """Whether no other value is valid, except for `files`."""
    files: bool = False
    """Whether `path.py:name` is valid too."""


def names_of(option: Option) -> Names:
    """The names of an option; none if it holds no name."""
    spec = option.spec
    if option.key in LAYERS:
        return Names(tuple(LAYERS[option.key]()), closed=option.key != PRESET)
    if spec.plugins:
        empty = ("",) if option.default == "" else ()
        known = (*empty, *PLUGINS[spec.plugins]())
        return Names(known, closed=spec.plugins not in _FREE_FORMS, files=spec.plugins not in _NO_FILES)
    return Names(spec.choices, closed=bool(spec.choices))


def help_of(option: Option) -> str:
    """The meaning of an option, the names of its values, and where packages offer more."""
    names = ", ".join(filter(None, names_of(option).known))
    group = f"packages offer more under {option.spec.plugins}" if option.spec.plugins else ""
    listed = "; ".join(filter(None, (names, group)))
    meaning = with_full_keys(option.spec.help)
    return f"{meaning}: {listed}" if listed else meaning


def dashed_setting(words: Iterable[str]) -> str:
    """What to write in place of a setting that is given like a flag; empty: none is.

    >>> dashed_setting(["algorithm=grpo", "--rollout.n=4"])
    'Settings have no dashes: write rollout.n=4 in place of --rollout.n=4.'
    >>> dashed_setting(["--top_p=1"])
    'Settings have no dashes; got --top_p=1. It is a key of TRL; here it is rollout.top_p.'
    """
    keys = {option.key for option in options()}
    for word in words:
        key, _, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            continue
        if key in keys:
            return f"Settings have no dashes: write {key}={value or 'VALUE'} in place of {word}."
        if hint := describe_other(key.replace("-", "_")):
            return f"Settings have no dashes; got {word}. {hint}"
    return ""
