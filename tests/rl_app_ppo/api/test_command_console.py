"""Output that ends early ends a command that prints, and not a run."""

from __future__ import annotations

import os

import pytest
from rich.text import Text

from rl_app_ppo.api.command_console import CommandConsole, RunConsole, written_output
from rl_protocol import OutputError


@pytest.fixture
def unread():
    """A pipe whose reader has ended."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        os.close(reading)
        yield file
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # what is in its buffer can't be written at the end


@pytest.fixture
def full():
    """A file of a full disk."""
    with open("/dev/full", "w") as file:  # noqa: PTH123 - a device
        yield file
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def test_a_command_ends_with_the_code_of_a_closed_pipe(unread):
    with pytest.raises(SystemExit) as ended:
        CommandConsole(file=unread).print(Text("a line"))
    assert ended.value.code == 141


def test_output_that_can_not_be_written_is_named(full):
    with pytest.raises(OutputError, match="standard output can't be written: No space left on device"):
        CommandConsole(file=full).print("a line")
    with pytest.raises(OutputError), written_output():
        print("a line", file=full, flush=True)


@pytest.mark.parametrize(("name", "reason"), [("unread", "Broken pipe"), ("full", "No space left on device")])
def test_a_run_continues_and_says_so_once(name, reason, request, capsys):
    out = RunConsole(file=request.getfixturevalue(name))
    for _ in range(3):
        out.print("a line")
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert f"standard output can't be written any more ({reason})" in said.err
    assert "the run continues" in said.err


def test_an_error_of_the_caller_is_not_taken_for_one_of_the_output(capsys):
    out = RunConsole()
    with pytest.raises(OSError, match="of the caller"), out:
        raise OSError("of the caller")
    out.print("a line")
    assert capsys.readouterr().out == "a line\n"
