"""Write a plug-in package: code, test, entry point, and what allows it on a host."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template

from rl_protocol import ConfigError, OutputError
from rl_protocol.support.options import nearest
from rl_protocol.support.temporary_folders import temporary_folder

PLACEHOLDER = "my_plugin"
"""Import name in the templates."""
NOT_INSTALLED = "The file also works where it lies, not installed, if the command allows it:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of plug-in."""

    description: str
    group: str
    """Entry point group."""
    object: str
    """Name of the entry point's object in the package."""
    use: str
    """Settings of a run of a demo that uses it."""
    dependencies: tuple[str, ...] = ("rl-trainer>=0.1,<0.2",)
    alone: bool = True
    """Whether the file works where it lies, without the other modules and not installed."""
    file_key: str = ""
    """Key that takes the file; that of the last setting in `use` by default."""


KINDS: Mapping[str, Kind] = {
    "reward": Kind(
        description="A reward function.",
        group="rl_trainer.rewards",
        object="score",
        use="reward.function=my_plugin",
    ),
    "tool": Kind(
        description="A tool that the policy may call.",
        group="rl_trainer.tools",
        object="TOOL",
        use="preset=demo-calculator rollout.agent.tools=calculator,my_plugin",
    ),
    "estimator": Kind(
        description="An advantage estimator.",
        group="rl_trainer.advantage_estimators",
        object="ESTIMATOR",
        use="algorithm.adv_estimator=my_plugin",
    ),
    "loss": Kind(
        description="A policy loss.",
        group="rl_trainer.policy_losses",
        object="LOSS",
        use="actor.policy_loss.loss_mode=my_plugin",
        dependencies=("rl-trainer[torch]>=0.1,<0.2",),
        alone=False,
    ),
    "hook": Kind(
        description="A hook, which is notified of the events of a run.",
        group="rl_trainer.hooks",
        object="HOOK",
        use="trainer.hooks=my_plugin",
    ),
    "engine": Kind(
        description="A rollout engine.",
        group="rl_app_ppo.rollout_engines",
        object="ENGINE",
        use="rollout.name=my_plugin",
        dependencies=("rl-app-ppo>=0.1,<0.2",),
    ),
    "weight_engine": Kind(
        description="A weight engine, which moves weights from the trainer to the rollout.",
        group="rl_ckpt_engine.backends",
        object="FileEngine",
        use="placement=separate checkpoint_engine.directory=versions checkpoint_engine.backend=my_plugin",
        dependencies=("rl-ckpt-engine>=0.1,<0.2",),
        file_key="checkpoint_engine.custom_backend_module",
    ),
    "backend": Kind(
        description="A backend of the data plane, which holds its bytes.",
        group="rl_transferqueue.backends",
        object="Backend",
        use="transfer_queue.backend_address=$PWD/blocks transfer_queue.backend=my_plugin",
        dependencies=("rl-transferqueue>=0.1,<0.2",),
        alone=False,
    ),
}


def words_of_file(kind: str, name: str) -> str:
    """Words of a command that uses the file where it lies; empty if it must be installed."""
    one = KINDS[kind]
    if not one.alone:
        return ""
    file = f"{name}/src/{name}/__init__.py"
    if one.file_key:
        return f"--trust {file} {one.use.replace(PLACEHOLDER, name)} {one.file_key}={file}:{one.object}"
    return f"--trust {file} {one.use}".replace(PLACEHOLDER, f"{file}:{one.object}")


def write_package(kind: str, name: str, parent: Path) -> Path:
    """Write the package `name` into a new folder of that name.

    Args:
        kind: one of KINDS.
        name: import name of the package, and name of the plug-in in settings.
        parent: folder that gets the new folder.

    Raises:
        ConfigError: an unknown kind, or a name that can't be used, as that of an installed package.
        OutputError: the folder exists or can't be written.
    """
    if kind not in KINDS:
        raise ConfigError(f"KIND must be one of {', '.join(KINDS)}; got {kind!r}.{nearest(kind, KINDS)}")
    _check_name(name)
    folder, files = parent / name, _files(kind, name)
    if folder.exists():
        raise OutputError(f"{folder} exists already; choose another NAME, or remove it.")
    try:
        with temporary_folder(f".{name}-", parent) as workshop:
            for place, text in files.items():
                path = workshop / "new" / place
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            (workshop / "new").rename(folder)
    except OSError as error:
        raise OutputError(f"{folder} can't be written: {error.strerror}.") from error
    return folder


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name.endswith("_"):
        raise ConfigError(f"NAME must be a Python module name in lower case, such as my_reward; got {name!r}.")
    if name in sys.stdlib_module_names or name.startswith("rl_") or find_spec(name) is not None:
        raise ConfigError(f"NAME={name} is the name of another package; choose one of your own, such as my_{name}.")


def _files(kind: str, name: str) -> dict[str, str]:
    """Path in the package -> text."""
    one, words = KINDS[kind], words_of_file(kind, name)
    values = {
        "description": one.description,
        "group": one.group,
        "package": one.group.partition(".")[0],
        "object": one.object,
        "use": one.use,
        "without_installing": f"\n{NOT_INSTALLED}\n\n```\nrl train {words}\n```\n" if words else "",
        "dependencies": ", ".join(f'"{line}"' for line in one.dependencies),
    }
    shared = {
        place: Template(_template(f"{place}.txt")).substitute(values)
        for place in ("pyproject.toml", "README.md", "plugins.toml")
    }
    sources = {
        f"src/{PLACEHOLDER}/__init__.py": _template(f"{kind}/code.py.txt"),
        f"src/{PLACEHOLDER}/py.typed": "",
        f"tests/test_{PLACEHOLDER}.py": _template(f"{kind}/test.py.txt"),
    }
    if kind == "loss":
        sources[f"src/{PLACEHOLDER}/function.py"] = _template("loss/function.py.txt")
    return {_named(place, name): _named(text, name) for place, text in (shared | sources).items()}


def _named(text: str, name: str) -> str:
    return text.replace(PLACEHOLDER, name).replace(PLACEHOLDER.replace("_", "-"), name.replace("_", "-"))


def _template(place: str) -> str:
    return (resources.files("rl_app_ppo.cli.new_package") / "templates" / place).read_text(encoding="utf-8")
