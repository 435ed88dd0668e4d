"""The entry points: a signal while they import ends the process without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rl_app_ppo
from rl_app_ppo.cluster.lost_processes import fate
from rl_protocol import ConfigError, RLError

INTERRUPTED_AT = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupt(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname == {module!r}:
            os.kill(os.getpid(), signal.{name})
            raise SystemExit("still there")

sys.meta_path.insert(0, Interrupt())
sys.argv = ["rl", "--help"]
from rl_app_ppo.cli.entry import {entry}
{entry}()
"""


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("entry", "module", "name"),
    [
        ("rl", "rl_app_ppo.cli.rl", "SIGINT"),
        ("rl", "omegaconf", "SIGTERM"),
        ("main", "rl_app_ppo.cli.main", "SIGHUP"),
    ],
)
def test_a_signal_during_imports_prints_one_line(entry, module, name):
    done = python(INTERRUPTED_AT.format(module=module, entry=entry, name=name))
    assert (done.returncode, done.stdout, done.stderr) == (-signal.Signals[name], "", "interrupted\n")


def test_a_signal_during_imports_ends_those_for_workers():
    code = INTERRUPTED_AT.replace('["rl", "--help"]', '["rl", "train"]').replace(
        "os.kill(", "from rl_app_ppo.cluster.local.fork_server import _early; print(_early[0].pid); os.kill("
    )
    done = python(
        "import functools\nprint = functools.partial(print, flush=True)\n"
        + code.format(module="rl_app_ppo.cli.rl", entry="rl", name="SIGTERM")
    )
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "interrupted\n")
    assert fate(int(done.stdout))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_during_a_command_is_its_interruption(name):
    done = python(
        "import signal, rl_app_ppo.cli.rl as module\n"
        "from rl_app_ppo.cli.entry import rl\nfrom rl_app_ppo.cli.exit_codes import exit_code\n"
        f"work = lambda: signal.raise_signal(signal.{name})\n"
        "module.app = lambda: exit(exit_code(work, module._err()))\nrl()"
    )
    assert (done.returncode, done.stderr) == (130, "interrupted; everything written so far is kept\n")


def test_a_signal_after_a_command_prints_one_line():
    done = python(
        "import signal, rl_app_ppo.cli.rl as module\nfrom rl_app_ppo.cli.entry import rl\n"
        "module.app = lambda: None\nrl()\nsignal.raise_signal(signal.SIGINT)"
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "interrupted\n")


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (["train", "rollout.n=4", "--config", "mine.yaml"], True),
        (["demo", "sums"], True),
        (["demo", "--list"], False),
        (["train", "--help"], False),
        (["explain", "rollout.n"], False),
        ([], False),
    ],
)
def test_commands_that_train_begin_workers_imports_and_collect_no_garbage(words, begins):
    done = python(
        f"import sys, rl_app_ppo.cli.rl as module\nsys.argv = ['rl', *{words!r}]\n"
        "from rl_app_ppo.cli.entry import rl\nfrom rl_app_ppo.cluster.local import fork_server\n"
        "import gc\nmodule.app = lambda: print(len(fork_server._early), gc.isenabled())\nrl()\nprint(fork_server._early)"
    )
    assert (done.stdout, done.stderr) == (f"{int(begins)} {not begins}\n[]\n", "")


def test_a_signal_that_is_ignored_stays_ignored():
    done = python(
        "import signal, rl_app_ppo.cli.rl as module\nfrom rl_app_ppo.cli.entry import rl\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "module.app = lambda: signal.raise_signal(signal.SIGHUP)\nrl()"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_signals_are_handled_before_other_modules_are_imported():
    done = python(
        "import sys\nbefore = set(sys.modules)\nimport rl_app_ppo.cli.entry\n"
        "print(sorted(name for name in {*sys.modules} - before if not name.startswith('rl_app_ppo')))"
    )
    assert (done.stdout, done.stderr) == ("['__future__']\n", "")


def test_the_package_imports_its_names_on_first_use():
    done = python(
        "import sys, rl_app_ppo\nmine = [name for name in sys.modules if name.startswith('rl_')]\n"
        "print(mine, rl_app_ppo.TrainResult.__name__, rl_app_ppo.train.__name__)"
    )
    assert (done.stdout, done.stderr) == ("['rl_app_ppo'] TrainResult train\n", "")
    assert set(rl_app_ppo.__all__) <= set(dir(rl_app_ppo))
    assert (rl_app_ppo.ConfigError, rl_app_ppo.RLError) == (ConfigError, RLError)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        rl_app_ppo.trian  # noqa: B018


def rl(*words, **settings):
    code = "from rl_app_ppo.cli.entry import rl; rl()"
    return subprocess.Popen([sys.executable, "-c", code, *words], text=True, stderr=subprocess.PIPE, **settings)


@pytest.mark.parametrize("words", [["explain"], ["explain", "rollout", "--json"], ["--help"]])
def test_a_reader_that_ends_ends_the_command_without_a_traceback(words):
    reading, writing = os.pipe()
    os.close(reading)
    process = rl(*words, stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")


@pytest.mark.parametrize("words", [["explain"], ["explain", "rollout", "--json"], ["--help"], ["diff", "--help"], []])
def test_a_full_disk_is_a_message(words):
    with Path("/dev/full").open("w") as full:
        process = rl(*words, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("error: standard output can't be written: No space left on device")
    assert err.count("\n") == 1


def test_an_encoding_without_a_character_prints_a_question_mark():
    process = rl(
        "explain",
        "trainer.run_name",
        "trainer.run_name=\u00fc",
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "trainer.run_name = '?'" in out


@pytest.mark.parametrize(("closed", "words", "code"), [("1", "--json", 0), ("2", "rollout.nn=1", 2), ("0,1,2", "", 0)])
def test_closed_standard_streams_are_no_error(closed, words, code):
    program = f"import os, sys; [os.close(n) for n in ({closed},)]; os.execv(sys.argv[1], sys.argv[1:])"
    command = (sys.executable, "-c", "from rl_app_ppo.cli.entry import rl; rl()", "explain", "rollout.n", words)
    done = subprocess.run(
        [sys.executable, "-c", program, *filter(None, command)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")
