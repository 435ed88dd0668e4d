"""The command `rl`, as a shell calls it: output, errors and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from rl_app_ppo.cli import rl
from rl_app_ppo.cli.main import main
from rl_app_ppo.config.loading import load_config, shown_yaml
from rl_trainer.record.record_file import RecordFile
from rl_trainer.record.record_rows import TrajectoryRow
from rl_trainer.rewards.scorer import Failure, Scored
from rl_trainer.workers.sample_log import SampleRow


@pytest.fixture
def run():
    def call(*words):
        done = CliRunner().invoke(rl.app, list(words), prog_name="rl")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done

    return call


@pytest.fixture
def samples(tmp_path):
    """A run with samples of the validations 0 and 5."""
    (tmp_path / "config.yaml").touch()
    rewards = {0: 0.5, 1: None, 2: 1.0, 10: 0.0}
    for step in (0, 5):
        rows = [
            SampleRow(
                key=f"v{step}-{number}/0/0",
                data_source="sums",
                prompt=f"{number}+1=",
                response="x" * (20 - number),
                ground_truth="t",
                outcome=Failure(kind="timeout", message="") if reward is None else Scored(numbers={"score": reward}),
            )
            for number, reward in rewards.items()
        ]
        (tmp_path / "samples").mkdir(exist_ok=True)
        (tmp_path / "samples" / f"{step}.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(rows))
    return tmp_path


def test_training_samples_are_those_that_the_run_has_recorded(run, tmp_path):
    (tmp_path / "config.yaml").touch()
    row = TrajectoryRow(
        at=1.0,
        step=3,
        key="s3-0/0/0",
        why="best",
        data_source="sums",
        ground_truth="2",
        prompt="1+1=",
        response="2<eos>",
        prompt_ids=[1],
        response_ids=[2],
        response_mask=[1],
        rollout_log_probs=[0.0],
        versions=[(0, 1)],
        reward={"score": 0.75, "acc": 1.0},
    )
    failed = msgspec.structs.replace(row, key="s3-0/1/0", reward={}, failure="raised ValueError (near.py:4)")
    file = RecordFile(tmp_path / "record", "reward")
    file.append([row, msgspec.structs.replace(row, step=2), failed])
    file.close()
    _, *lines = run("samples", str(tmp_path), "--train").output.splitlines()
    assert [line.split() for line in lines] == [
        ["s3-0/0/0", "0.750", "1+1=", "2<eos>", "2"],
        ["s3-0/1/0", "failed", "1+1=", "2<eos>", "2"],
    ]
    (older,) = json.loads(run("samples", str(tmp_path), "--train", "--step", "2", "--json").output)
    assert older["outcome"]["numbers"] == {"score": 0.75, "acc": 1.0}


def test_train_starts_what_the_words_say(run, monkeypatch, tmp_path):
    """`rl train` and `uv run apps/ppo` start the same run."""
    started = []
    for module in (rl, sys.modules[main.__module__]):
        monkeypatch.setattr(module, "launch", lambda config, *_, before_s: started.append(config))
    file = tmp_path / "my.yaml"
    file.write_text("rollout:\n  n: 16\n")
    done = run("train", "--config", str(file), "actor.optim.lr=1e-5")
    assert (done.exit_code, done.output) == (0, "")
    assert main(["--config", str(file), "actor.optim.lr=1e-5"]) == 0
    assert started == [load_config(["actor.optim.lr=1e-5"], file)] * 2


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["config", "rollout.n=4"], ["--cfg", "rollout.n=4"]),
        (["config", "--schema"], ["--schema"]),
        (["explain", "actor.optim.lr", "algorithm=ppo"], ["--explain", "actor.optim.lr", "algorithm=ppo"]),
        (["plan", "placement=separate"], ["--plan", "placement=separate"]),
        (["diff", "", "algorithm=ppo"], ["--diff", "", "algorithm=ppo"]),
        (
            ["launch", "slurm", "trainer.n_gpus_per_node=0", "--cpus", "3", "--time", "1:00:00"],
            ["--launch", "slurm", "trainer.n_gpus_per_node=0", "--cpus", "3", "--time", "1:00:00"],
        ),
    ],
)
def test_commands_print_what_the_flags_of_the_app_print(run, capsys, words, same):
    done = run(*words)
    assert main(same) == 0
    assert (done.exit_code, done.output) == (0, capsys.readouterr().out)


def test_a_program_can_read_the_configuration_a_key_and_a_difference(run):
    assert json.loads(run("config", "rollout.n=4", "--json").output) == yaml.safe_load(
        shown_yaml(load_config(["rollout.n=4"]))
    )
    (key,) = json.loads(run("explain", "rollout.n", "rollout.n=4", "--json").output)
    assert (key["key"], key["value"], key["origin"], key["type"]) == ("rollout.n", 4, "command line", "int")
    (change,) = json.loads(run("diff", "", "rollout.n=4", "--json").output)
    assert (change["key"], change["b"], change["origin_b"]) == ("rollout.n", 4, "command line")
    assert json.loads(run("diff", "", "", "--json").output) == []


def test_two_runs_are_compared_by_their_folders(run, tmp_path):
    for name, n in (("one run", 4), ("another", 6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(shown_yaml(load_config([f"rollout.n={n}"])))
    one, other = str(tmp_path / "one run"), str(tmp_path / "another")
    assert run("diff", one, other).output == f"rollout.n: 4 (run {one}) -> 6 (run {other})\n"
    file = tmp_path / "mine.yaml"
    file.write_text("[]")
    done = run("diff", one, str(file))
    assert done.exit_code == 2
    assert f"{file}: expected a mapping" in done.output


def test_a_program_can_read_the_plan(run):
    plan = json.loads(run("plan", "placement=separate", "rollout.num_workers=2", "--json").output)
    processes = {tuple(process["roles"]): process for process in plan["processes"]}
    assert {roles: process["count"] for roles, process in processes.items()} == {
        ("actor",): 1,
        ("ref",): 1,
        ("rollout",): 2,
        ("reward",): 1,
    }
    assert processes["actor",]["memory"]["actor"]["optimizer"] == 8 * plan["trained"]
    assert processes["reward",]["memory"] == {"reward": {}}
    assert plan["data_plane_bytes"] > 0
    assert plan["weight_sync_bytes"] == 4 * plan["weights"]


@pytest.mark.parametrize(
    ("settings", "nbytes"),
    [
        ([], lambda plan: 0),  # one process has the actor and the rollout
        (["placement=separate", "rollout.dtype=bfloat16"], lambda plan: 2 * plan["weights"]),
        (["placement=separate", "lora.rank=4", "rollout.dtype=bfloat16"], lambda plan: 4 * plan["trained"]),
        (["placement=separate", "lora.rank=4", "lora.merge=true"], lambda plan: 4 * plan["weights"]),
        (["placement=separate", "checkpoint_engine.enabled=false"], lambda plan: 0),
    ],
)
def test_the_plan_has_the_bytes_of_a_weight_sync(run, settings, nbytes):
    plan = json.loads(run("plan", *settings, "--json").output)
    assert plan["weight_sync_bytes"] == nbytes(plan)


def test_every_key_has_a_line(run):
    lines = run("explain").output.splitlines()
    keys = [one["key"] for one in json.loads(run("explain", "--json").output)]
    assert [line.split()[0] for line in lines] == keys
    assert "actor.optim.lr" in keys


def test_import_verl_converts_and_its_exit_code_tells_of_losses(run, tmp_path):
    file = tmp_path / "verl.txt"
    file.write_text("actor_rollout_ref.rollout.n=5")
    done = run("import-verl", str(file))
    assert done.exit_code == 0
    assert yaml.safe_load(done.stdout)["rollout"]["n"] == 5
    file.write_text("distillation.enabled=True")
    assert run("import-verl", str(file)).exit_code == 1
    assert run("import-verl", str(file), "--accept-losses").exit_code == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=1", "rollout.n must be at least 2"),
        (
            "actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.router_replay.mode=R3 "
            "actor_rollout_ref.rollout.name=vllm",
            "rollout.name=vllm does not report the experts",
        ),
    ],
)
def test_import_verl_says_what_is_lost_if_the_conversion_fails(run, tmp_path, settings, message):
    file = tmp_path / "verl.txt"
    file.write_text(f"{settings} actor_rollout_ref.actor.no_such_key=3")
    done = run("import-verl", str(file))
    assert done.exit_code == 2
    assert f"the converted configuration is not valid: {message}" in done.stderr
    assert "\n# lost: actor_rollout_ref.actor.no_such_key=3: there is no such key in verl" in done.stderr


def test_samples_are_those_of_the_newest_step_in_the_order_that_is_asked_for(run, samples):
    keys = [row["key"] for row in json.loads(run("samples", str(samples), "--json").output)]
    assert keys == ["v5-0/0/0", "v5-1/0/0", "v5-2/0/0", "v5-10/0/0"]
    shown = run("samples", str(samples), "--step", "0", "--sort", "reward", "--limit", "3").output.splitlines()
    assert [line.split()[:3] for line in shown] == [
        ["key", "reward", "prompt"],
        ["v0-1/0/0", "failed", "1+1="],
        ["v0-10/0/0", "0.000", "10+1="],
        ["v0-0/0/0", "0.500", "0+1="],
        ["3", "of", "4"],
    ]
    best = ("samples", str(samples), "--step", "0", "--sort", "reward", "--descending", "--json")
    assert [row["key"] for row in json.loads(run(*best).output)][1:] == ["v0-0/0/0", "v0-10/0/0", "v0-1/0/0"]
    lengths = json.loads(run("samples", str(samples), "--sort", "length", "--json").output)
    assert [len(row["response"]) for row in lengths] == [10, 18, 19, 20]


def test_a_demo_is_a_run_of_its_preset(run, monkeypatch):
    started = []
    monkeypatch.setattr(rl, "launch", lambda config, *_, before_s: started.append(config))
    listed = [line.split()[0] for line in run("demo", "--list").output.splitlines()]
    assert listed == ["grpo", "calculator", "countdown", "opd", "ppo", "sft"]
    for words in (["demo"], ["demo", "rollout.n=4"], ["demo", "ppo"], ["demo", "calculator", "rollout.n=4"]):
        assert run(*words).exit_code == 0
    presets = ["demo", "demo", "demo-ppo", "demo-calculator"]
    more = [[], ["rollout.n=4"], [], ["rollout.n=4"]]
    assert started == [load_config([f"preset={name}", *rest]) for name, rest in zip(presets, more, strict=True)]


def test_new_writes_a_package_into_this_folder(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    done = run("new", "reward", "near")
    assert done.exit_code == 0
    code, readme = "near/src/near/__init__.py", "near/README.md"
    assert [word for word in done.output.split() if word.startswith("near/")] == [code, readme, code]
    assert Path(code).exists()
    assert Path(readme).exists()
    assert f"rl train --trust {code} reward.function={code}:score" in done.output


WRONG = {
    "bogus": "No such command 'bogus'",
    "train nothing=1": "Unknown key 'nothing'",
    "train rollout.n=x": "rollout.n",
    "train --nothing": "No such option: --nothing",
    "train --rollout.n=4": "write rollout.n=4",
    "plan algorithm=ppo --model_engine fsdp": "write model_engine=VALUE",
    "train --config /no/such.yaml": "/no/such.yaml",
    "demo calculato": "Did you mean 'calculator'",
    "demo grpo nothing=1": "Unknown key 'nothing'",
    "new rewards x": "Did you mean 'reward'",
    "new reward ../x": "NAME must be",
    "plan rollout.n=0": "rollout.n",
    "config nothing": "nothing",
    "config --config": "--config",
    "explain --config": "--config",
    "explain rollout.m": "rollout.m",
    "diff a": "Missing argument",
    "diff a=1 b=1": "Unknown key 'a'",
    "launch": "Missing argument",
    "launch nowhere trainer.n_gpus_per_node=0": "nowhere",
    "launch slurm trainer.n_gpus_per_node=0 --cpus none": "--cpus",
    "launch slurm trainer.n_gpus_per_node=0 --image a": "--image",
    "import-verl /no/such.yaml": "/no/such.yaml",
    "samples /no/such/run": "/no/such/run is no folder of a run",
    "diff /no/such a=1": "/no/such",
    "diff / a=1": "/ is no folder of a run",
    "samples RUN --step 3": "there are those of steps 0, 5",
    "samples RUN --sort size": "--sort must be one of key, reward, length",
    "samples RUN --limit 0": "--limit",
    "samples RUN --train": "no samples of training; see trainer.sample_freq",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_named_with_exit_code_2(run, samples, line):
    done = run(*line.replace("RUN", str(samples)).split())
    assert done.exit_code == 2
    assert WRONG[line] in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_the_help_fits_a_screen_and_names_every_command(run):
    lines = run("--help").output.splitlines()
    assert len(lines) <= 40
    named = " ".join(lines)
    assert all(command.name in named for command in rl.app.registered_commands if command.name)


def test_every_argument_and_option_has_a_help_text():
    commands = get_command(rl.app).commands
    bare = [f"{name} {one.name}" for name, command in commands.items() for one in command.params if not one.help]
    assert (bare, len(commands)) == ([], len(rl.app.registered_commands))


def test_the_command_is_installed_and_works_in_any_folder(tmp_path):
    command = Path(sys.executable).with_name("rl")
    done = subprocess.run(
        [command, "explain", "rollout.n"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("rollout.n = ")
