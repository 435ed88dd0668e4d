"""The command line: `uv run apps/ppo [key=value ...]`.

Exit codes: 0 done, 1 a run that failed or a conversion that loses settings, 2 wrong configuration or output folder, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rl_app_ppo.config import load_config, options, resolve, to_yaml
from rl_app_ppo.explain import difference, explain, read_side
from rl_app_ppo.layers import algorithms, presets
from rl_app_ppo.schema import LOCAL, AppConfig
from rl_app_ppo.startup import Startup
from rl_ckpt_engine import PluginPolicy, load_policy
from rl_protocol import ConfigError, OutputError, RLError

RAY_SETTINGS = {
    # One uv environment serves driver and workers of a machine. Ray's hook would package the working folder and start uv for every
    # worker, in another folder, 20 s later.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""What Ray is told unless the environment says otherwise."""
LOCAL_RAY_SETTINGS = {
    # Despite its name, this decides on Linux, too, whether Ray listens at the address of the host (and then at all of its interfaces) or at
    # 127.0.0.1. Ray takes a loopback address given to ray.init for that of the host.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
}
"""Settings of a Ray that belongs to the run (ray.address=local): it listens on loopback and asks every caller for its token."""

USAGE = """\
usage: uv run apps/ppo [--help] [--cfg] [--explain KEY] [--diff A B] [--from-verl FILE [--accept-losses]]
                        [--config FILE] [--allow-unsafe-plugins] [key=value ...]

Trains a language model with PPO or GRPO. Without arguments: the demo, on this machine, without a GPU.

  algorithm=NAME   choose the algorithm:
{algorithms}
  preset=NAME      choose the values above its defaults:
{presets}
  key=value        set any key below, for instance actor.optim.lr=1e-5 rollout.n=8
  --config FILE    read settings from YAML (overrides win)
  --cfg            print the resolved configuration and exit
  --explain KEY    say what a key, or each key of a group, means, its value and what set it, and exit
  --diff A B       print where two configurations differ and exit; each is a YAML file, or overrides such as "algorithm=ppo rollout.n=4"
  --from-verl FILE turn a verl 0.9 configuration (YAML, a list of overrides, or a shell script) into ours, print it and exit;
                   exit code 1 where settings that change what is learnt have no counterpart
  --accept-losses  with --from-verl: exit code 0 nevertheless
  --allow-unsafe-plugins
                   let checkpoint_engine.custom_backend_module and checkpoint_manager_class name any code, as package.module or module:Class
  --help           print this and exit

keys:
"""


UNSAFE_PLUGINS = "--allow-unsafe-plugins"
ACCEPT_LOSSES = "--accept-losses"
FLAGS = {
    "--help": 0,
    "-h": 0,
    "--cfg": 0,
    "--explain": 1,
    "--diff": 2,
    "--from-verl": 1,
    ACCEPT_LOSSES: 0,
    "--config": 1,
    UNSAFE_PLUGINS: 0,
}
"""Flag -> how many words follow it."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A command line taken apart."""

    overrides: tuple[str, ...] = ()
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Flag -> the words that followed it."""

    @property
    def config_file(self) -> Path | None:
        """What --config names."""
        return Path(self.flags["--config"][0]) if "--config" in self.flags else None


def parse(argv: Sequence[str]) -> Arguments:
    """Take a command line apart.

    Raises:
        ConfigError: an unknown flag, or one without its words.
    """
    overrides: list[str] = []
    flags: dict[str, tuple[str, ...]] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in FLAGS:
            count = FLAGS[word]
            if len(rest) < count:
                what = {"--config": "a file, for instance --config my.yaml", "--diff": "two configurations"}
                raise ConfigError(f"{word} needs {what.get(word, 'a word after it')}; see --help.")
            flags["--help" if word == "-h" else word] = tuple(rest[:count])
            del rest[:count]
        elif word.startswith("-"):
            raise ConfigError(f"Unknown flag {word!r}; there are {', '.join(FLAGS)}. Settings are given as key=value.")
        else:
            overrides.append(word)
    return Arguments(tuple(overrides), flags)


def help_text() -> str:
    """Usage, and every key with its default and meaning."""
    lines = [USAGE.format(algorithms=_listed(algorithms()), presets=_listed(presets()))]
    listed = list(options())
    width = max(len(option.key) for option in listed)
    lines += [f"  {o.key:<{width}}  {o.type:<5}  {o.default!s:<9}  {o.help}\n" for o in listed]
    return "".join(lines)


def _listed(described: Mapping[str, str]) -> str:
    width = max(map(len, described))
    return "\n".join(f"                     {name:<{width}}  {what}" for name, what in described.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        if "--from-verl" in arguments.flags:
            return _convert(arguments, out, err)
        answer = _answer(arguments)
        if answer is not None:
            out.print(Text(answer), end="", soft_wrap=True)
            return 0
        plugins = load_policy(allow_unsafe_plugins=UNSAFE_PLUGINS in arguments.flags)
        return _train(load_config(arguments.overrides, arguments.config_file), plugins, out)
    except RLError as error:
        wrong_input = isinstance(error, ConfigError | OutputError)
        err.print(Text(f"{'error' if wrong_input else 'the run failed'}: {error}"), soft_wrap=True)
        return 2 if wrong_input else 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        err.print(Text("interrupted; everything written so far is kept"))
        return 130


def _convert(arguments: Arguments, out: Console, err: Console) -> int:
    from rl_app_ppo.verl.convert import from_verl  # it reads verl's defaults, which nothing else needs

    if arguments.overrides or "--config" in arguments.flags:
        raise ConfigError(
            "--from-verl converts a file alone; give overrides when you run what it prints, with --config."
        )
    conversion = from_verl(Path(arguments.flags["--from-verl"][0]))
    out.print(Text(conversion.text), end="", soft_wrap=True)
    if not conversion.lost or ACCEPT_LOSSES in arguments.flags:
        return 0
    err.print(
        Text(
            f"values that change what is learnt and are lost: {len(conversion.lost)}; see the lines '# lost:' above. {ACCEPT_LOSSES} makes the "
            "exit code 0."
        ),
        soft_wrap=True,
    )
    return 1


def _answer(arguments: Arguments) -> str | None:
    """What is to be printed in place of a run."""
    flags = arguments.flags
    if "--help" in flags:
        return help_text()
    if "--diff" in flags:
        a, b = flags["--diff"]
        return difference(read_side(a), read_side(b)) + "\n"
    if "--explain" in flags:
        return explain(flags["--explain"][0], resolve(arguments.overrides, arguments.config_file))
    return to_yaml(load_config(arguments.overrides, arguments.config_file)) if "--cfg" in flags else None


def _train(config: AppConfig, plugins: PluginPolicy, out: Console) -> int:
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    if config.ray.address == LOCAL:
        os.environ.update(LOCAL_RAY_SETTINGS)
    startup = Startup(lambda line: out.print(Text(line), soft_wrap=True))
    try:
        with startup.phase("imports", "importing libraries"):
            from rl_app_ppo.launch import (
                launch,
            )  # imports Ray, which --help and --cfg do without, and which reads its settings then
        launch(config, plugins, out, startup)
    finally:
        startup.end()
    return 0
