"""The command line asks about files that it names itself, once, and never about those of others."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest
from trust import trust
from typer.testing import CliRunner

from rl_app_ppo.cli import rl
from rl_app_ppo.cli.main import main
from rl_app_ppo.cli.trusted import allowed_files, remembered_file
from rl_protocol import ConfigError, OutputError
from rl_protocol.support.trusted_files import trusted_files
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl_trainer.algorithms.losses import POLICY_LOSSES
from rl_trainer.driver.hooks import HOOKS
from rl_trainer.rollout.agents import TOOLS
from rl_trainer.rollout.session_kinds import SESSIONS


@pytest.fixture
def near(tmp_path, monkeypatch):
    """A file in the current folder, and a home without answers."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RL_TRUSTED_FILES", raising=False)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "near.py").write_text("def score(*_): return 1.0\n")
    return here / "near.py"


@pytest.fixture
def ask():
    """A user who says yes; `asked` has the questions."""

    class User:
        def __init__(self):
            self.asked, self.answer = [], True

        def __call__(self, question):
            self.asked.append(question)
            return self.answer

    return User()


WORDS = ("reward.function=0.75*exact_match,0.25*near.py:score",)


def test_an_answer_holds_until_the_file_changes(near, ask):
    assert list(allowed_files(WORDS, (), ask)) == [str(near)]
    assert list(allowed_files(WORDS, (), ask)) == [str(near)]
    assert list(allowed_files(WORDS, (), None)) == [str(near)]  # also where nobody can be asked
    sha256 = hashlib.sha256(near.read_bytes()).hexdigest()
    assert ask.asked == [f"{near} (sha256 {sha256[:12]}) runs as a part of the training. Do you trust it?"]
    near.write_text("raise SystemExit\n")
    assert allowed_files(WORDS, (), None) == {}
    assert list(allowed_files(WORDS, (), ask)) == [str(near)]
    assert "has changed since you allowed it" in ask.asked[1]
    assert not list(near.parent.glob("*.json"))
    assert remembered_file().stat().st_mode & 0o777 == 0o600


def test_no_is_not_remembered(near, ask):
    ask.answer = False
    assert allowed_files(WORDS, (), ask) == allowed_files(WORDS, (), ask) == {}
    assert len(ask.asked) == 2


def test_only_files_of_this_folder_that_the_words_name_are_asked_about(near, ask, tmp_path):
    other = tmp_path / "other.py"
    other.write_text("x = 1\n")
    (near.parent / "link.py").symlink_to(other)
    (near.parent / "judge.toml").write_text("")
    words = [f"reward.function={other}:x", "trainer.hooks=[link.py:x]", "rollout.session=gone.py:x", "near.py"]
    assert allowed_files(words, (), ask) == {}
    words = ["reward.function=judge.toml", "trainer.hooks=[near.py:a,near.py:b]"]
    assert list(allowed_files(words, (), ask)) == [str(near.parent / "judge.toml"), str(near)]


def test_trust_allows_a_file_wherever_it_is_named(near, ask, tmp_path):
    other = tmp_path / "other.py"
    other.write_text("x = 1\n")
    assert list(allowed_files((), (other,), ask)) == [str(other)]
    assert list(allowed_files(WORDS, (near,), None)) == [str(near)]
    assert ask.asked == []
    assert allowed_files((), (), None) == {}
    with pytest.raises(ConfigError, match=r"--trust gone\.py: the file can't be read"):
        allowed_files((), (near.with_name("gone.py").relative_to(near.parent),), None)


def test_damaged_answers_are_asked_for_again_and_a_home_that_cannot_be_written_is_named(near, ask, monkeypatch):
    remembered_file().parent.mkdir(parents=True)
    remembered_file().write_text("{")
    assert list(allowed_files(WORDS, (), ask)) == [str(near)]
    assert json.loads(remembered_file().read_text()).keys() == {str(near)}
    monkeypatch.setenv("XDG_STATE_HOME", str(near))
    with pytest.raises(OutputError, match="Use --trust"):
        allowed_files(WORDS, (), ask)


@pytest.mark.parametrize("trusted", [False, True])
def test_both_command_lines_pass_what_is_allowed_to_the_run(near, monkeypatch, trusted):
    started = []
    for module in (rl, sys.modules[main.__module__]):
        monkeypatch.setattr(module, "launch", lambda *_, before_s: started.append(list(trusted_files())))
    words = [*WORDS, *(["--trust", "near.py"] if trusted else [])]
    assert CliRunner().invoke(rl.app, ["train", *words]).exit_code == 0
    assert main(words) == 0
    assert started == [[str(near)] if trusted else []] * 2
    assert trusted_files() == {}


KINDS = {
    "algorithm.adv_estimator": (
        ADVANTAGE_ESTIMATORS,
        "from rl_trainer.algorithms.advantages import Estimator, grpo\nIT = Estimator(grpo)",
    ),
    "actor.policy_loss.loss_mode": (
        POLICY_LOSSES,
        "from rl_trainer.algorithms.losses import PolicyLoss\nIT = PolicyLoss(print)",
    ),
    "trainer.hooks": (HOOKS, "from rl_trainer import Hook\nIT = Hook()"),
    "rollout.session": (SESSIONS, "from rl_trainer import SessionKind\nIT = SessionKind(print)"),
    "rollout.agent.tools": (
        TOOLS,
        "from rl_trainer.rollout.agents import Calculator, ToolKind\nIT = ToolKind(Calculator)",
    ),
}


@pytest.mark.parametrize("key", KINDS)
def test_every_kind_follows_the_rule(key, near):
    registry, code = KINDS[key]
    near.write_text(code)
    with pytest.raises(ConfigError, match=r"near\.py'.* add --trust near\.py to the command"):
        registry.get("near.py:IT")
    trust(near)
    assert registry.get("near.py:IT") is registry.get("near.py:IT")
    near.write_text("IT = 3")
    trust(near)
    with pytest.raises(ConfigError, match=r"near\.py:IT must be of type \w+; got int"):  # a later run of this process
        registry.get("near.py:IT")


COMMANDS = (["config"], ["plan"], ["explain", "rollout.n"], ["launch", "slurm", "trainer.n_gpus_per_node=0"])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_that_read_settings_take_the_permission(command, near):
    near.write_text(KINDS["algorithm.adv_estimator"][1])
    words = [*command, "algorithm.adv_estimator=near.py:IT"]
    refused = CliRunner().invoke(rl.app, words)
    assert refused.exit_code == 2
    assert "algorithm.adv_estimator='near.py'" in refused.output
    done = CliRunner().invoke(rl.app, [*words, "--trust", "near.py"])
    assert done.exit_code == 0, done.output
    assert command[0] != "launch" or "--trust near.py" in done.output


def test_a_configuration_with_a_file_is_compared_with_another(near):
    near.write_text(KINDS["algorithm.adv_estimator"][1])
    (near.parent / "run.yaml").write_text("algorithm: {adv_estimator: 'near.py:IT'}\n")
    assert CliRunner().invoke(rl.app, ["diff", "run.yaml", ""]).exit_code == 2
    done = CliRunner().invoke(rl.app, ["diff", "run.yaml", "", "--trust", "near.py"])
    assert (done.exit_code, "near.py:IT" in done.output) == (0, True)


def test_a_file_of_a_configuration_is_refused(near):
    (near.parent / "run.yaml").write_text("reward: {function: 'near.py:score'}\n")
    done = CliRunner().invoke(rl.app, ["train", "--config", "run.yaml"])
    assert done.exit_code == 2
    assert "reward.function='near.py'" in done.output
    assert "add --trust near.py to the command" in done.output


RL = "from rl_app_ppo.cli.rl import app; app()"


def test_a_user_on_a_terminal_is_asked(near):
    """A real terminal; the answer No, and the end of the input, refuse with the flag to give."""
    command = [sys.executable, "-c", RL, "config", "algorithm.adv_estimator=near.py:IT"]
    near.write_text(KINDS["algorithm.adv_estimator"][1])
    for keys, code, said in (
        (b"n\n", 2, "add --trust near.py"),
        (b"\x04", 2, "add --trust near.py"),
        (b"y\n", 0, "adv_estimator: near.py:IT"),
        (b"", 0, "adv_estimator: near.py:IT"),
    ):
        shown, found = on_terminal(command, keys)
        assert found == code, shown
        assert said in shown
        assert ("Do you trust it? [y/N]" in shown) == bool(keys)


def on_terminal(command: list[str], keys: bytes) -> tuple[str, int]:
    """What a command prints on a terminal where these keys are typed, and its exit code."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        os.write(ours, keys)
        shown = b""
        with suppress(OSError):  # EIO: the other end is closed
            while more := os.read(ours, 65536):
                shown += more
        code = process.wait(60)
    os.close(ours)
    return shown.decode(), code
