"""Named layers of settings that come with the app: an algorithm (`algorithm=NAME`) and a preset (`preset=NAME`).

An algorithm has the defaults of its paper and of verl. The presets hold the values of the demo: sizes and learning rates that suit its model
and task, and no other. They apply where no data.train_files are given, or where `preset=` names one, and never together with data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from rl_protocol import ConfigError
from rl_trainer.algorithms.registry import nearest

ALGORITHM, PRESET = "algorithm", "preset"
"""Keys that name a layer. `algorithm.name` is another spelling of the first, as a file has it."""
NO_PRESET = "none"
DEMO_OF = {"grpo": "demo", "ppo": "demo-ppo"}
"""Algorithm -> preset that applies where neither `preset` nor data.train_files is given."""
ALIASES = {"grpo_calculator": ("grpo", "demo-calculator")}
"""Value of `algorithm` -> algorithm and preset."""

Source = tuple[str, Mapping[str, Any]]
"""(origin, dotted key -> value) of a file or of the command line."""


@dataclass(frozen=True, slots=True)
class Named:
    """A name, and what gave it."""

    name: str
    origin: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Which layers apply."""

    algorithm: Named
    preset: Named


def algorithms() -> dict[str, str]:
    """Name -> description of every value that `algorithm=` takes."""
    return _described("algorithms")


def presets() -> dict[str, str]:
    """Name -> description of every value that `preset=` takes."""
    return {
        **_described("presets"),
        NO_PRESET: "the defaults of the algorithm alone; this applies with data.train_files",
    }


def layer_text(kind: str, name: str) -> str:
    """YAML of the layer `name`; `kind` is algorithms or presets."""
    return (resources.files("rl_app_ppo") / kind / f"{name}.yaml").read_text(encoding="utf-8")


def choose(sources: Sequence[Source], algorithm_of: Mapping[str, str]) -> Choice:
    """Find the algorithm and the preset of a configuration.

    Args:
        sources: weakest first.
        algorithm_of: preset -> its algorithm, which applies where no source names one.

    Raises:
        ConfigError: a name that does not exist, two sources that disagree, or a preset of the demo together with data.
    """
    sources = [_without_alias(source) for source in sources]
    preset = _one(PRESET, [(origin, values[PRESET]) for origin, values in sources if values.get(PRESET)])
    algorithm = _one(
        ALGORITHM,
        [(origin, values[key]) for origin, values in sources for key in (ALGORITHM, "algorithm.name") if key in values],
    )
    if preset is not None:
        _check(PRESET, preset.name, presets())
    if algorithm is None:
        of_preset = algorithm_of.get(preset.name) if preset else None
        algorithm = Named(of_preset, f"preset={preset.name}") if preset and of_preset else Named("grpo", "default")
    _check(ALGORITHM, algorithm.name, algorithms())
    files = next((values["data.train_files"] for _, values in reversed(sources) if "data.train_files" in values), "")
    if preset is None:
        preset = Named(NO_PRESET if files else DEMO_OF[algorithm.name], "default")
    if files and preset.name != NO_PRESET:
        raise ConfigError(
            f"preset={preset.name} ({preset.origin}) holds values for the demo's model and task, which do not fit data.train_files="
            f"{files!r}. Leave the preset out and set the keys your model and data need, or leave out data.train_files."
        )
    return Choice(algorithm, preset)


def _without_alias(source: Source) -> Source:
    origin, values = source
    for key in (ALGORITHM, "algorithm.name"):
        if (name := str(values.get(key))) in ALIASES:
            algorithm, preset = ALIASES[name]
            values = {PRESET: preset, **values, key: algorithm}
    return origin, values


def _one(key: str, found: Sequence[tuple[str, object]]) -> Named | None:
    """The name that all of them give; None where there are none."""
    for origin, name in found[1:]:
        if name != found[0][1]:
            raise ConfigError(
                f"{key}={name} ({origin}) and {key}={found[0][1]} ({found[0][0]}) disagree, and values of both would be mixed. Set one of "
                "them."
            )
    return Named(str(found[-1][1]), found[-1][0]) if found else None


def _check(key: str, name: str, known: Mapping[str, str]) -> None:
    if name not in known:
        elsewhere = f" {PRESET}={name} is a preset." if key == ALGORITHM and name in presets() else nearest(name, known)
        raise ConfigError(f"{key} must be one of {', '.join(known)}; got {name!r}.{elsewhere}")


def _described(kind: str) -> dict[str, str]:
    """Name -> first line of each file, which is a comment."""
    files = [entry.name for entry in (resources.files("rl_app_ppo") / kind).iterdir()]
    names = sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))
    return {name: layer_text(kind, name).partition("\n")[0].removeprefix("# ") for name in names}
