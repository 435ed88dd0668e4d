"""When the report of a run that goes on is written."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace

import pytest
from hostile_run import write_run

from rl_app_ppo.driver import report_writer
from rl_app_ppo.driver.report_writer import ReportWriter
from rl_app_ppo.outputs.run_folder import RunFiles


@pytest.fixture
def files(tmp_path):
    return RunFiles(folder=write_run(tmp_path / "run", outcome=""))


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [0.0]
    monkeypatch.setattr(report_writer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_run_that_goes_on_has_its_report_after_a_step(files):
    async def steps() -> None:
        writer = ReportWriter(files, print, every_s=0.0)
        writer.on_step_end(1, {})
        await writer.close()

    asyncio.run(steps())
    assert files.report.read_bytes().startswith(b"<!doctype html>")
    assert [path.name for path in files.folder.glob(".*")] == []


def test_reports_take_a_hundredth_of_the_time_and_one_is_written_at_a_time(files, clock, monkeypatch):
    """Each takes 3 s: the first one may begin after 60 s, the next one 300 s after its end."""
    written: list[float] = []

    def write(folders, target):
        written.append(clock[0])
        clock[0] += 3.0

    monkeypatch.setattr(report_writer, "write_report", write)

    async def steps() -> None:
        writer = ReportWriter(files, print)
        for now in (1.0, 59.0, 60.0, 64.0, 362.0, 363.0):
            clock[0] = now
            writer.on_step_end(1, {})
            writer.on_step_end(2, {})
            await writer.close()

    asyncio.run(steps())
    assert written == [60.0, 363.0]


def test_a_report_that_cannot_be_written_ends_no_run(files, caplog):
    files.report.mkdir()

    async def steps() -> None:
        writer = ReportWriter(files, print, every_s=0.0)
        writer.on_step_end(1, {})
        await writer.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(steps())
    assert "The report can't be written: " in caplog.text


def test_a_report_that_is_late_after_the_run_is_named_and_waited_for(files, caplog, monkeypatch):
    begun, go_on, said = threading.Event(), threading.Event(), list[str]()

    def write(folders, target):
        begun.set()
        assert go_on.wait(60)
        target.write_text("written")

    monkeypatch.setattr(report_writer, "write_report", write)
    monkeypatch.setattr(report_writer, "CLOSE_S", 0.01)

    async def steps() -> None:
        writer = ReportWriter(files, said.append, every_s=0.0)
        writer.on_step_end(1, {})
        assert await asyncio.to_thread(begun.wait, 60)
        await writer.close()
        assert not files.report.exists()
        go_on.set()

    with caplog.at_level(logging.WARNING):
        asyncio.run(steps())
    (line,) = said
    assert line.startswith(f"the report {files.report} is being written for more than 0.01 s after the run")
    assert line in caplog.text
    assert files.report.read_text() == "written", "the end of the event loop waits for it"


def test_a_report_that_is_there_in_time_is_not_mentioned(files):
    said = list[str]()

    async def steps() -> None:
        writer = ReportWriter(files, said.append, every_s=0.0)
        writer.on_step_end(1, {})
        await writer.close()

    asyncio.run(steps())
    assert said == []
