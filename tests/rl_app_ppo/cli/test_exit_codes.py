"""Exit codes and interruptions of commands."""

from __future__ import annotations

import signal
from io import StringIO

import pytest
from rich.console import Console

from rl_app_ppo.cli import exit_codes
from rl_app_ppo.cli.entry import end
from rl_app_ppo.cli.exit_codes import exit_code


def test_a_ctrl_c_that_arrives_twice_does_not_interrupt_the_clean_up():
    cleaned, err = [], Console(file=StringIO())

    def work():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            cleaned.append(True)
        return 0

    assert exit_code(work, err) == 130
    assert cleaned == [True]
    assert err.file.getvalue().startswith("interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_and_ctrl_c_together_are_one_interruption():
    cleaned, err = [], Console(file=StringIO())
    before = signal.signal(signal.SIGTERM, end)

    def work():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)
            cleaned.append(True)
        return 0

    try:
        assert exit_code(work, err) == 130
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)
    assert cleaned == [True]
    assert err.file.getvalue().startswith("interrupted")


def test_sigterm_keeps_its_default_action_outside_the_command_line():
    def work():
        return int(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)

    assert exit_code(work, Console(file=StringIO())) == 0


def test_a_later_ctrl_c_interrupts_again(monkeypatch):
    monkeypatch.setattr(exit_codes, "SAME_S", 0.0)

    def work():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            raise
        return 0

    assert exit_code(work, Console(file=StringIO())) == 130


def test_the_handler_of_a_caller_stays():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))

    def work():
        signal.raise_signal(signal.SIGINT)
        return 0

    try:
        assert exit_code(work, Console(file=StringIO())) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1]
