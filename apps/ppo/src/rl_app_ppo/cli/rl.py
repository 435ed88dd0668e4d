"""The command `rl`. `rl train` is `uv run apps/ppo`; see exit_codes.py for the exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import msgspec
import typer
import yaml
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from rl_app_ppo.api.command_console import CLOSED, CommandConsole, RunConsole, written_output
from rl_app_ppo.api.launch import launch
from rl_app_ppo.chaos.command import chaos
from rl_app_ppo.cli.bench import bench, speed_text
from rl_app_ppo.cli.cluster_files.launch_files import JOB_FLAGS, KINDS, launch_text
from rl_app_ppo.cli.columns import columns
from rl_app_ppo.cli.exit_codes import exit_code
from rl_app_ppo.cli.explain import described, difference, differing, explain, keys_text, read_side
from rl_app_ppo.cli.import_verl import import_verl
from rl_app_ppo.cli.json_schema import schema_text
from rl_app_ppo.cli.new_package.write import KINDS as PLUGIN_KINDS
from rl_app_ppo.cli.new_package.write import words_of_file, write_package
from rl_app_ppo.cli.option_names import dashed_setting
from rl_app_ppo.cli.report import report
from rl_app_ppo.cli.samples import SORTS, read_samples, samples_text
from rl_app_ppo.cli.trusted import trusting
from rl_app_ppo.config.loading import load_config, resolve, shown_yaml
from rl_app_ppo.config.presets import demo_words, demos
from rl_app_ppo.outputs.startup_times import command_age
from rl_app_ppo.replay.command import ReplayOptions, replay
from rl_app_ppo.watch.follow import follow
from rl_ckpt_engine import load_policy
from rl_protocol.counted import counted

Words = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, such as rollout.n=8.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML settings; KEY=VALUE wins.")]
Unsafe = Annotated[bool, typer.Option("--allow-unsafe-plugins", help="Allow any code in checkpoint_engine plug-ins.")]
Trust = Annotated[
    list[Path] | None, typer.Option("--trust", metavar="FILE", help="Allow the code of this file; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Params = ParamSpec("Params")
TRAIN, BEFORE, AFTER = "Train", "Before a run", "After a run"


class _Commands(TyperGroup):
    """The commands; names the setting where one is written like a flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if wrong := dashed_setting(args):
            raise typer.BadParameter(wrong)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_help(partial(super().format_help, ctx, formatter))


class _Command(TyperCommand):
    """A command; its help is output as any other."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_help(partial(super().format_help, ctx, formatter))


def _print_help(show: Callable[[], None]) -> None:
    """Print help; exit code 2 where it can't be written."""

    def work() -> int:
        with written_output():
            show()
        return 0

    if code := exit_code(work, _err()):
        raise typer.Exit(code)


app = typer.Typer(
    cls=_Commands,
    help="Train language models with PPO and GRPO. `rl COMMAND --help` describes one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_command = partial(app.command, cls=_Command)


def main() -> None:
    """Run the command. Help whose reader has ended ends with the code of other output."""
    try:
        app()
    except SystemExit as ended:  # rich and typer end with 1
        if isinstance(ended.__context__, BrokenPipeError):
            raise SystemExit(CLOSED) from None
        raise


def _coded(command: Callable[Params, None]) -> Callable[Params, None]:
    """The command, with its errors as messages and exit codes."""

    @wraps(command)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> None:
        def work() -> int:
            command(*args, **kwargs)
            return 0

        raise typer.Exit(exit_code(work, _err()))

    return run


@_command("train", rich_help_panel=TRAIN)
@_coded
def _train(
    words: Words = None, config: ConfigFile = None, trust: Trust = None, allow_unsafe_plugins: Unsafe = False
) -> None:
    """Train; without settings the demo, on this machine."""
    plugins = load_policy(allow_unsafe_plugins=allow_unsafe_plugins)
    with trusting(words, trust, _err()):
        launch(load_config(words or (), config), plugins, _terminal(), before_s=command_age())


@_command("demo", rich_help_panel=TRAIN)
@_coded
def _demo(
    name: Annotated[str, typer.Argument(help="Name of the demo; the first of the list by default.")] = "",
    words: Words = None,
    trust: Trust = None,
    listed: Annotated[bool, typer.Option("--list", help="List the demos, and start nothing.")] = False,
) -> None:
    """Train a demo: needs no data, model, GPU or account."""
    if listed:
        _print(columns([(demo, what) for demo, (_, what) in demos().items()]))
        return
    with trusting(words, trust, _err()):
        launch(load_config(demo_words(name, words or ())), load_policy(), _terminal(), before_s=command_age())


@_command("bench", rich_help_panel=BEFORE)
@_coded
def _bench(
    words: Words = None,
    config: ConfigFile = None,
    trust: Trust = None,
    allow_unsafe_plugins: Unsafe = False,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure, after a first one.")] = 5,
    as_json: Json = False,
) -> None:
    """Measure seconds and tokens of a step on this machine."""
    plugins = load_policy(allow_unsafe_plugins=allow_unsafe_plugins)
    with trusting(words, trust, _err()):
        speed = bench(words or (), config, steps, plugins, _err(), command_age())
    if as_json:
        _print_json(speed)
    else:
        _print(speed_text(speed))


@_command("doctor", rich_help_panel=BEFORE)
@_coded
def _doctor(
    words: Words = None,
    config: ConfigFile = None,
    trust: Trust = None,
    allow_unsafe_plugins: Unsafe = False,
    as_json: Json = False,
) -> None:
    """Say what this machine has, and whether a run can start."""
    from rl_app_ppo.checks.facts import Facts
    from rl_app_ppo.checks.registry import findings

    plugins = load_policy(allow_unsafe_plugins=allow_unsafe_plugins)
    with trusting(words, trust, _err()):
        found = list(findings(Facts(load_config(words or (), config), plugins), "doctor"))
    errors = sum(one.level == "error" for one in found)
    if as_json:
        _print_json(found)
    else:
        _print(columns([(one.level, one.what, one.text) for one in found]) + _verdict(errors))
    if errors:
        raise typer.Exit(2)


def _verdict(errors: int) -> str:
    found = "" if not errors else f"{counted(errors, 'error')}: no "
    return f"{found or 'A '}run with these settings can start.\n"


@_command("plan", rich_help_panel=BEFORE)
@_coded
def _plan(
    words: Words = None,
    config: ConfigFile = None,
    trust: Trust = None,
    allow_unsafe_plugins: Unsafe = False,
    as_json: Json = False,
) -> None:
    """Print the processes of a run, with GPUs and memory."""
    from rl_app_ppo.checks.plan import make_plan, plan_text  # torch

    with trusting(words, trust, _err()):
        plan = make_plan(load_config(words or (), config), load_policy(allow_unsafe_plugins=allow_unsafe_plugins))
    if as_json:
        _print_json(plan)
    else:
        _print(plan_text(plan))
    if plan.refused:
        raise typer.Exit(2)


@_command("config", rich_help_panel=BEFORE)
@_coded
def _show_config(
    words: Words = None,
    config: ConfigFile = None,
    trust: Trust = None,
    as_json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON schema of --config files.")] = False,
) -> None:
    """Print the resolved configuration, without unused defaults."""
    if schema:
        _print(schema_text())
        return
    with trusting(words, trust, _err()):
        text = shown_yaml(load_config(words or (), config))
    if as_json:
        _print_json(yaml.safe_load(text))
    else:
        _print(text)


@_command("explain", rich_help_panel=BEFORE)
@_coded
def _explain_key(
    key: Annotated[str, typer.Argument(help="A key or a group of keys; without one, a line for every key.")] = "",
    words: Words = None,
    config: ConfigFile = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Print meaning, value and origin of a key or a group."""
    with trusting(words, trust, _err()):
        resolved = resolve(words or (), config)
        if as_json:
            _print_json(described(key, resolved))
        else:
            _print(explain(key, resolved) if key else keys_text())


@_command("diff", rich_help_panel=BEFORE)
@_coded
def _diff(
    a: Annotated[
        str, typer.Argument(help='Folder of a run, YAML file, or settings such as "rollout.n=4 trainer.seed=1".')
    ],
    b: Annotated[str, typer.Argument(help='What to compare it with; "" is the defaults.')],
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Print how two runs, YAML files or quoted overrides differ."""
    with trusting((), trust, _err()):
        sides = read_side(a), read_side(b)
        if as_json:
            _print_json(differing(*sides))
        else:
            _print(difference(*sides) + "\n")


@_command("launch", rich_help_panel=BEFORE)
@_coded
def _launch_file(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=", ".join(KINDS))],
    words: Words = None,
    config: ConfigFile = None,
    trust: Trust = None,
    cpus: Annotated[str | None, typer.Option(help=JOB_FLAGS["--cpus"])] = None,
    memory: Annotated[str | None, typer.Option(help=JOB_FLAGS["--memory"])] = None,
    time: Annotated[str | None, typer.Option(help=JOB_FLAGS["--time"])] = None,
    gpu_type: Annotated[str | None, typer.Option(help=JOB_FLAGS["--gpu-type"])] = None,
    image: Annotated[str | None, typer.Option(help=JOB_FLAGS["--image"])] = None,
    volume: Annotated[str | None, typer.Option(help=JOB_FLAGS["--volume"])] = None,
) -> None:
    """Print a file that starts the run on a cluster."""
    given = {"--cpus": cpus, "--memory": memory, "--time": time, "--gpu-type": gpu_type, "--image": image}
    given["--volume"] = volume
    flags = {flag: value for flag, value in given.items() if value is not None}
    trusted = [word for file in trust or () for word in ("--trust", str(file))]
    line = (*(("--config", str(config)) if config else ()), *trusted, *(words or ()))
    with trusting(words, trust, _err()):
        _print(launch_text(kind, load_config(words or (), config), line, flags, load_policy()))


@_command("import-verl", rich_help_panel=BEFORE)
@_coded
def _convert_verl(
    file: Annotated[Path, typer.Argument(help="YAML, a list of overrides, or a shell script.")],
    accept_losses: Annotated[bool, typer.Option("--accept-losses", help="Exit code 0 in spite of them.")] = False,
) -> None:
    """Convert a verl 0.9 file; exit code 1 if settings are lost."""
    raise typer.Exit(import_verl(file, _out(), _err(), accept_losses=accept_losses))


@_command("samples", rich_help_panel=AFTER)
@_coded
def _samples(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    step: Annotated[int | None, typer.Option(help="Step; the newest by default.")] = None,
    sort: Annotated[str, typer.Option(help=f"{', '.join(SORTS)}; the lowest first.")] = "key",
    descending: Annotated[bool, typer.Option("--descending", help="The highest first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Samples.")] = 20,
    training: Annotated[bool, typer.Option("--train", help="Of training, not of validation.")] = False,
    as_json: Json = False,
) -> None:
    """Print responses of a step with their rewards."""
    found = read_samples(run, step, train=training, sort=sort, descending=descending)
    rows = found[:limit]
    if as_json:
        _print_json(rows)
        return
    _print(samples_text(rows))
    if len(found) > len(rows):
        _print(f"{len(rows)} of {len(found)} responses; --limit {len(found)} shows all\n")


@_command("new", rich_help_panel=BEFORE)
@_coded
def _new(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=", ".join(PLUGIN_KINDS))],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Import name of the package, such as my_reward.")],
) -> None:
    """Write a plug-in package with a passing test."""
    folder = write_package(kind, name, Path())
    _print(f"{folder}/src/{name}/__init__.py has the code, {folder}/README.md says how to test and install it\n")
    words = words_of_file(kind, name)
    _print(f"try it: rl train {words}\n" if words else "")


@_command("watch", rich_help_panel=AFTER)
@_coded
def _watch(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    web: Annotated[bool, typer.Option("--web", help="Serve its report on loopback, until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --web; 0: a free one.")] = 0,
) -> None:
    """Follow a run on the terminal; exit code 1 if it fails."""
    if not follow(run, _out(), port if web else None):
        raise typer.Exit(1)


@_command("report", rich_help_panel=AFTER)
@_coded
def _report(
    run: Annotated[Path, typer.Argument(help="Folder of the run, which may be running, failed or killed.")],
    run2: Annotated[Path | None, typer.Argument(help="Folder of a run to compare it with.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to; report.html of the run.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write the report of a run as one HTML file; of two, compared."""
    report(run, run2, out, _out(), show=show)


@_command("replay", rich_help_panel=AFTER)
@_coded
def _replay(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    step: Annotated[int, typer.Option(help="The step to compute again, from the checkpoint before it.")],
    row: Annotated[
        str, typer.Option(metavar="KEY", help="Only print this row of its batch, such as s5-0/0/0, or a number from 0.")
    ] = "",
    field: Annotated[str, typer.Option(help="Only print this field, of --row or of all rows.")] = "",
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Only compare the batches up to it with those of this run.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    allow_unsafe_plugins: Unsafe = False,
) -> None:
    """Compute a step again and compare it, or look inside."""
    plugins = load_policy(allow_unsafe_plugins=allow_unsafe_plugins)
    options = ReplayOptions(run=run, step=step, row=row, field=field, against=against, json=json)
    if not replay(options, plugins, _out(), _err()):
        raise typer.Exit(1)


@_command("chaos", rich_help_panel=BEFORE)
@_coded
def _chaos(
    runs: Annotated[int, typer.Option(min=1, help="Runs.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Decides what is struck, how and when.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="Number of the first run; a failed one says its own.")] = 0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report after each run; those that it has are skipped.")
    ] = None,
    at_a_time: Annotated[int, typer.Option(min=1, help="Runs at once.")] = 1,
    without_model: Annotated[
        bool, typer.Option("--without-model", help="A stand-in takes the place of models and Ray; ten times faster.")
    ] = False,
) -> None:
    """Disturb small runs; exit code 1 if anything is lost."""
    if not chaos(runs, seed, first, json, _out(), model=not without_model, at_a_time=at_a_time):
        raise typer.Exit(1)


def _terminal() -> RunConsole:
    return RunConsole(highlight=False)


def _out() -> CommandConsole:
    return CommandConsole(highlight=False)


def _err() -> RunConsole:
    return RunConsole(stderr=True, highlight=False)


def _print(text: str) -> None:
    _out().print(Text(text), end="", soft_wrap=True)


def _print_json(value: object) -> None:
    with written_output():
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")
        sys.stdout.flush()
