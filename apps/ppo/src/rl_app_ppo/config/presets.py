"""Named layers of settings: algorithms (`algorithm=NAME`) and presets (`preset=NAME,FILE,...`).

An algorithm has the defaults of its paper and of verl. A built-in preset of a demo has sizes and
learning rates that suit its model and task only. It applies without data.train_files, or if
`preset=` names it, but never together with data. The other built-in presets start from a model and
data files of the user, whose paths they name. A preset can also be a YAML file of the user.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Any

from rl_app_ppo.config.plain_yaml import flatten, parse_yaml
from rl_protocol import ConfigError
from rl_protocol.support.options import items, nearest

ALGORITHM, PRESET = "algorithm", "preset"
"""Keys that select a layer. In files `algorithm.name` is another spelling of the first."""
NO_PRESET = "none"
DEMO_OF = {"grpo": "demo", "ppo": "demo-ppo", "opd": "demo-opd", "opd_pg": "demo", "sft": "demo-sft"}
"""Algorithm -> preset that applies without `preset` and data.train_files."""
ALIASES = {"grpo_calculator": ("grpo", "demo-calculator")}
"""Value of `algorithm` -> algorithm and preset."""

Source = tuple[str, Mapping[str, Any]]
"""(origin, dotted key -> value) of a file or of the command line."""


@dataclass(frozen=True, slots=True)
class Named:
    """The name of a layer, and its origin."""

    name: str
    origin: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The layers that apply."""

    algorithm: Named
    presets: tuple[str, ...]
    """Weakest first."""
    preset_origin: str


def algorithms() -> dict[str, str]:
    """Name -> description of every value that `algorithm=` takes."""
    return _described("algorithms")


def presets() -> dict[str, str]:
    """Name -> description of every value that `preset=` takes."""
    return {
        **_described("presets"),
        NO_PRESET: "the defaults of the algorithm alone; this applies with data.train_files",
    }


def demos() -> dict[str, tuple[str, str]]:
    """Name of every demo for `rl demo` -> its preset and description; the default one is first."""
    default = DEMO_OF["grpo"]
    found = {name: what for name, what in _described("presets").items() if of_demo(name)}
    others = {name.removeprefix("demo-"): (name, what) for name, what in found.items() if name != default}
    return {"grpo": (default, found[default]), **others}


def demo_words(name: str, words: Sequence[str]) -> tuple[str, ...]:
    """The settings of the demo `name`, or of the first, and then `words`.

    Raises:
        ConfigError: there is no such demo.
    """
    if "=" in name:
        name, words = "", (name, *words)
    known = demos()
    name = name or next(iter(known))
    if name not in known:
        raise ConfigError(f"There are the demos {', '.join(known)}; got {name!r}.{nearest(name, known)}")
    return (f"{PRESET}={known[name][0]}", *words)


def layer_text(kind: str, name: str) -> str:
    """YAML of the layer `name`; `kind` is algorithms or presets."""
    return (resources.files("rl_app_ppo.config") / "builtin" / kind / f"{name}.yaml").read_text(encoding="utf-8")


@functools.cache
def layer_values(kind: str, name: str) -> Mapping[str, Any]:
    """Dotted key -> value of the layer `name`; `kind` is algorithms or presets."""
    return MappingProxyType(flatten(parse_yaml(layer_text(kind, name))))


def is_file(preset: str) -> bool:
    """Whether a value of `preset=` is a file and no name."""
    return preset.endswith((".yaml", ".yml"))


def of_demo(preset: str) -> bool:
    """Whether a value of `preset=` has the values of a demo's model and task."""
    if preset == NO_PRESET or is_file(preset):
        return False
    return "data.demo" in layer_values("presets", preset)


def named_presets(sources: Sequence[Source]) -> tuple[str, ...]:
    """The presets that the sources name, weakest first; empty if none does.

    Raises:
        ConfigError: one is unknown, or two sources disagree.
    """
    found = _presets([_without_alias(source) for source in sources])
    return () if found is None else found[0]


def choose(sources: Sequence[Source], algorithm_of: Mapping[str, str]) -> Choice:
    """Find the algorithm and the presets of a configuration.

    Args:
        sources: weakest first.
        algorithm_of: preset -> its algorithm, which applies if no source names one.

    Raises:
        ConfigError: an unknown name, two sources that disagree, or a demo preset with data.
    """
    sources = [_without_alias(source) for source in sources]
    given = _presets(sources)
    algorithm = _one(
        ALGORITHM,
        [
            (origin, str(values[key]))
            for origin, values in sources
            for key in (ALGORITHM, "algorithm.name")
            if key in values
        ],
    )
    if algorithm is None:
        of_presets = [(name, algorithm_of[name]) for name in (given[0] if given else ()) if name in algorithm_of]
        algorithm = Named(of_presets[-1][1], f"preset={of_presets[-1][0]}") if of_presets else Named("grpo", "default")
    _check(ALGORITHM, algorithm.name, algorithms())
    files = next((values["data.train_files"] for _, values in reversed(sources) if "data.train_files" in values), "")
    names, origin = given or ((NO_PRESET if files else DEMO_OF[algorithm.name],), "default")
    demos = [name for name in names if of_demo(name)]
    if files and demos:
        raise ConfigError(
            f"preset={demos[0]} ({origin}) has values for the demo's model and task, which do not fit data.train_files="
            f"{files!r}. Remove the preset and set the keys your model and data need, or remove data.train_files."
        )
    return Choice(algorithm, names, origin)


def _presets(sources: Sequence[Source]) -> tuple[tuple[str, ...], str] | None:
    """The presets on which the sources agree, and their origin; None if no source has one."""
    found = [(origin, ",".join(map(str, items(values.get(PRESET))))) for origin, values in sources]
    named = _one(PRESET, [(origin, names) for origin, names in found if names])
    if named is None:
        return None
    names = tuple(items(named.name))
    for name in names:
        if not is_file(name):
            _check(PRESET, name, presets())
    return names, named.origin


def _without_alias(source: Source) -> Source:
    origin, values = source
    for key in (ALGORITHM, "algorithm.name"):
        if (name := str(values.get(key))) in ALIASES:
            algorithm, preset = ALIASES[name]
            values = {PRESET: preset, **values, key: algorithm}
    return origin, values


def _one(key: str, found: Sequence[tuple[str, str]]) -> Named | None:
    """The name on which all sources agree; None if no source has one."""
    for origin, name in found[1:]:
        if name != found[0][1]:
            raise ConfigError(
                f"{key}={name} ({origin}) and {key}={found[0][1]} ({found[0][0]}) disagree, and the values of both would be mixed. Set one of "
                "them."
            )
    return Named(found[-1][1], found[-1][0]) if found else None


def _check(key: str, name: str, known: Mapping[str, str]) -> None:
    if name not in known:
        elsewhere = f" {PRESET}={name} is a preset." if key == ALGORITHM and name in presets() else nearest(name, known)
        raise ConfigError(f"{key} must be one of {', '.join(known)}; got {name!r}.{elsewhere}")


def _described(kind: str) -> dict[str, str]:
    """Name -> first line of each file, a comment with its description."""
    files = [entry.name for entry in (resources.files("rl_app_ppo.config") / "builtin" / kind).iterdir()]
    names = sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))
    return {name: layer_text(kind, name).partition("\n")[0].removeprefix("# ") for name in names}
