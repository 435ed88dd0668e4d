"""The command line `uv run apps/ppo [key=value ...]`; see exit_codes.py for the exit codes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rl_app_ppo.api.command_console import CommandConsole, RunConsole
from rl_app_ppo.api.launch import launch
from rl_app_ppo.cli.cluster_files.launch_files import JOB_FLAGS, KINDS, launch_text
from rl_app_ppo.cli.exit_codes import exit_code
from rl_app_ppo.cli.explain import difference, explain, keys_text, read_side
from rl_app_ppo.cli.import_verl import import_verl
from rl_app_ppo.cli.json_schema import schema_text
from rl_app_ppo.cli.option_names import dashed_setting
from rl_app_ppo.cli.trusted import trusting
from rl_app_ppo.config.loading import load_config, resolve, shown_yaml
from rl_app_ppo.config.presets import algorithms, presets
from rl_app_ppo.outputs.startup_times import command_age
from rl_ckpt_engine import load_policy
from rl_protocol import ConfigError

USAGE = """\
usage: uv run apps/ppo [--help] [--cfg] [--plan] [--schema] [--explain KEY] [--diff A B] [--from-verl FILE [--accept-losses]]
                        [--config FILE] [--trust FILE] [--allow-unsafe-plugins] [key=value ...]
                        [--launch KIND [--cpus N] [--time HH:MM:SS] ...]

Trains a language model with PPO or GRPO. Without arguments: the demo, on this machine, without a GPU.

  algorithm=NAME   choose the algorithm:
{algorithms}
  preset=NAME,...  choose values that override its defaults; later ones win; a name can be a YAML file:
{presets}
  key=value        set any key below, for instance actor.optim.lr=1e-5 rollout.n=8
  --config FILE    read settings from YAML (overrides win)
  --cfg            print the resolved configuration, without defaults that nothing reads, and exit
  --plan           print the processes that a run would start, with their GPUs and their memory by estimate, and exit
  --launch KIND    print a file that starts the run on a cluster, and exit: {kinds}
{job_flags}
  --schema         print a JSON schema of --config files, with which editors complete and check them, and exit
  --explain KEY    print the meaning, value and origin of a key, or of each key of a group, and exit
  --diff A B       print the differences of two configurations and exit; each is a YAML file, a run folder, or "algorithm=ppo rollout.n=4"
  --from-verl FILE convert a verl 0.9 configuration (YAML, a list of overrides, or a shell script), print the result and exit;
                   exit code 1 if a setting that changes the result of training has no counterpart
  --accept-losses  with --from-verl: exit code 0 in spite of lost settings
  --trust FILE     allow the code of this file, which a setting names as path.py:name; may be repeated
  --allow-unsafe-plugins
                   allow any code in checkpoint_engine.custom_backend_module and checkpoint_manager_class, as package.module or module:Class
  --help           print this and exit

keys:
"""


UNSAFE_PLUGINS = "--allow-unsafe-plugins"
TRUST = "--trust"
ACCEPT_LOSSES = "--accept-losses"
FLAGS = {
    "--help": 0,
    "-h": 0,
    "--cfg": 0,
    "--plan": 0,
    "--schema": 0,
    "--explain": 1,
    "--diff": 2,
    "--from-verl": 1,
    ACCEPT_LOSSES: 0,
    "--config": 1,
    "--launch": 1,
    **dict.fromkeys(JOB_FLAGS, 1),
    UNSAFE_PLUGINS: 0,
    TRUST: 1,
}
"""Flag -> number of arguments."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A parsed command line."""

    overrides: tuple[str, ...] = ()
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Flag -> its arguments."""

    @property
    def config_file(self) -> Path | None:
        """The file of --config."""
        return Path(self.flags["--config"][0]) if "--config" in self.flags else None

    @property
    def trusted(self) -> list[Path]:
        """The files of --trust."""
        return [Path(file) for file in self.flags.get(TRUST, ())]

    @property
    def line(self) -> tuple[str, ...]:
        """The command line of the run, for a job that starts it later."""
        config = ("--config", *self.flags["--config"]) if "--config" in self.flags else ()
        trust = [word for file in self.flags.get(TRUST, ()) for word in (TRUST, file)]
        return (*config, *trust, *self.overrides)


def parse(argv: Sequence[str]) -> Arguments:
    """Parse a command line.

    Raises:
        ConfigError: an unknown flag, or a flag without its arguments.
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
            before = flags.get(word, ()) if word == TRUST else ()
            flags["--help" if word == "-h" else word] = (*before, *rest[:count])
            del rest[:count]
        elif word.startswith("-"):
            known = f"there are {', '.join(FLAGS)}. Settings are given as key=value."
            raise ConfigError(dashed_setting([word]) or f"Unknown flag {word!r}; {known}")
        else:
            overrides.append(word)
    return Arguments(tuple(overrides), flags)


def help_text() -> str:
    """The usage, and every key with its default and meaning."""
    job_flags = "\n".join(f"    {flag:<14} {meaning}" for flag, meaning in JOB_FLAGS.items())
    named = {"algorithms": _listed(algorithms()), "presets": _listed(presets())}
    return USAGE.format(**named, kinds=", ".join(KINDS), job_flags=job_flags) + keys_text()


def _listed(described: Mapping[str, str]) -> str:
    width = max(map(len, described))
    return "\n".join(f"                     {name:<{width}}  {what}" for name, what in described.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    out, err = CommandConsole(highlight=False), RunConsole(stderr=True, highlight=False)

    def work() -> int:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        if "--from-verl" in arguments.flags:
            return _convert(arguments, out, err)
        with trusting(arguments.overrides, arguments.trusted, err):
            return _run(arguments, out)

    return exit_code(work, err)


def _run(arguments: Arguments, out: Console) -> int:
    answer = _answer(arguments)
    if answer is not None:
        out.print(Text(answer), end="", soft_wrap=True)
        return 0
    plugins = load_policy(allow_unsafe_plugins=UNSAFE_PLUGINS in arguments.flags)
    config = load_config(arguments.overrides, arguments.config_file)
    if "--plan" in arguments.flags:
        from rl_app_ppo.checks.plan import make_plan, plan_text  # torch: other commands need none

        plan = make_plan(config, plugins)
        out.print(Text(plan_text(plan)), end="", soft_wrap=True)
        return 2 if plan.refused else 0
    launch(config, plugins, RunConsole(highlight=False), before_s=command_age())
    return 0


def _convert(arguments: Arguments, out: Console, err: Console) -> int:
    if arguments.overrides or "--config" in arguments.flags:
        raise ConfigError(
            "--from-verl takes no overrides and no --config; give overrides when you run its output with --config."
        )
    file = Path(arguments.flags["--from-verl"][0])
    return import_verl(file, out, err, accept_losses=ACCEPT_LOSSES in arguments.flags)


def _answer(arguments: Arguments) -> str | None:
    """The text to print instead of a run; None: train."""
    flags = arguments.flags
    if "--help" in flags:
        return help_text()
    if "--schema" in flags:
        return schema_text()
    if "--diff" in flags:
        a, b = flags["--diff"]
        return difference(read_side(a), read_side(b)) + "\n"
    if "--explain" in flags:
        return explain(flags["--explain"][0], resolve(arguments.overrides, arguments.config_file))
    job_flags = {flag: flags[flag][0] for flag in JOB_FLAGS if flag in flags}
    if "--launch" in flags:
        config = load_config(arguments.overrides, arguments.config_file)
        return launch_text(flags["--launch"][0], config, arguments.line, job_flags, load_policy())
    if job_flags:
        raise ConfigError(f"{next(iter(job_flags))} needs --launch, whose file it is for.")
    return shown_yaml(load_config(arguments.overrides, arguments.config_file)) if "--cfg" in flags else None
