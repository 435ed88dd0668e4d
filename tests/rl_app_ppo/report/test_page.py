"""The report as a file: its data, its policy, and texts that stay data."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import struct
import webbrowser

import msgspec
import numpy as np
import pytest
from forked import in_a_fork
from hostile_run import HOSTILE, write_run
from typer.testing import CliRunner

from rl_app_ppo.cli import rl
from rl_app_ppo.report import run_data
from rl_app_ppo.report.page import write_report
from rl_trainer.record.read_record import read_record
from rl_trainer.record.record_file import RecordFile

KINDS = {"i2": np.int16, "i4": np.int32, "f4": np.float32, "f8": np.float64, "u1": np.uint8}


def unpacked(page):
    """The header and a reader of columns, by the layout that packing.py documents."""
    (encoded,) = re.findall(r'<script id="data" type="application/octet-stream">([^<]*)</script>', page)
    block = gzip.decompress(base64.b64decode(encoded))
    (size,) = struct.unpack("<I", block[:4])
    base = -(-(4 + size) // 8) * 8

    def column(place):
        kind, at, count = place
        return np.frombuffer(block, KINDS[kind], count, base + at).tolist()

    return json.loads(block[4 : 4 + size]), column


@pytest.fixture
def page(tmp_path):
    def make(*runs, **settings):
        folders = [write_run(tmp_path / name, **settings) for name in runs]
        write_report(folders, tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return make


def test_the_data_are_those_of_the_run(page, tmp_path):
    header, column = unpacked(page("a"))
    (run,) = header["runs"]
    assert (run["name"], run["outcome"]["state"], run["total"]) == ("a", "finished", 6)
    assert column(run["metrics"]["step"]) == list(range(7))
    validation = column(run["metrics"]["columns"]["val-core/sums/acc/mean@1"])
    assert validation[::2] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert all(np.isnan(validation[1::2]))
    rows, found = read_record(tmp_path / "a" / "record").trajectories, run["trajectories"]
    assert found["count"] == len(rows) == 96
    assert column(found["step"]) == [row.step for row in rows]
    assert [found["prompts"][i] for i in column(found["prompt"])] == [row.prompt for row in rows]
    assert found["response"] == [row.response for row in rows]
    tokens = [found["vocabulary"][i] for i in column(found["tokens"])]
    assert tokens == [(*HOSTILE, "x" * 300_000)[i] for row in rows for i in row.response_ids]
    assert column(found["columns"]["old_log_probs"])[:4] == [-250, -1000, -9000, -2500]
    assert found["columns"]["entropy"] is None
    spans = run["spans"]
    assert [spans["stages"][i] for i in column(spans["stage"])] == ["rollout", "update_actor"] * 6
    assert run["syncs"] == [[1009.95, 1010.0, 1, 3 << 20, 2]]
    assert column(run["ends"]["at"]) == [1010.0 + step for step in range(7)]


def test_a_number_that_is_not_finite_is_one_that_is_not_there(tmp_path):
    """As in a run whose weights diverged."""
    folder = write_run(tmp_path / "a", steps=1)
    (row, *_) = read_record(folder / "record").trajectories
    nan = float("nan")
    file = RecordFile(folder / "record", "again")
    file.append(
        [msgspec.structs.replace(row, key="s1-99/0/0", advantages=[nan] * 4, old_log_probs=[-0.25, nan, 0.0, 1.0])]
    )
    file.close()
    write_report([folder], tmp_path / "report.html")
    header, column = unpacked((tmp_path / "report.html").read_text(encoding="utf-8"))
    found = header["runs"][0]["trajectories"]
    at = 4 * found["key"].index("s1-99/0/0")
    absent = np.iinfo(np.int16).min
    assert column(found["columns"]["old_log_probs"])[at : at + 4] == [-250, absent, 0, 1000]
    assert column(found["columns"]["advantages"])[at : at + 4] == [absent] * 4


def test_no_text_of_a_run_is_markup_and_the_policy_allows_nothing_else(page):
    text = page("a <title><script>bad")
    for hostile in HOSTILE:
        assert hostile not in text
    assert "<title>a &lt;title&gt;&lt;script&gt;bad</title>" in text
    assert text.count("<script") == 2
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    script, style = (re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[0] for tag in ("script", "style"))
    for name, content in (("script-src", script), ("style-src", style)):
        assert rules[name] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script)
    assert not re.search(r"https?://", script.replace("http://www.w3.org", "") + style)


def test_secrets_of_the_environment_are_not_in_the_report(page, monkeypatch):
    text = page("a", texts=("nothing", "planted-secret-1234"))
    assert unpacked(text)[0]["runs"][0]["trajectories"]["vocabulary"] == ["nothing", "planted-secret-1234"]
    monkeypatch.setenv("WANDB_API_KEY", "planted-secret-1234")
    text = page("b", texts=("nothing", "planted-secret-1234"))
    assert unpacked(text)[0]["runs"][0]["trajectories"]["vocabulary"] == ["nothing", "[WANDB_API_KEY]"]
    assert "planted-secret-1234" not in json.dumps(unpacked(text)[0])


def test_a_killed_run_has_a_report(page):
    assert unpacked(page("a", outcome=""))[0]["runs"][0]["outcome"] == {"state": "unfinished", "text": ""}


def test_of_too_many_tokens_evenly_spread_steps_are_shown(page, monkeypatch):
    monkeypatch.setattr(run_data, "MOST_TOKENS", 64 * 3)
    header, column = unpacked(page("a", texts=("t",)))
    (run,) = header["runs"]
    assert set(column(run["trajectories"]["step"])) == {2, 4, 6}
    assert (run["trajectories"]["count"], run["every"]) == (48, 2)


def test_rl_report_writes_one_run_or_compares_two(tmp_path):
    a, b = write_run(tmp_path / "a", texts=("t",)), write_run(tmp_path / "b", texts=("t",))
    done = CliRunner().invoke(rl.app, ["report", str(a)])
    assert (done.exit_code, done.output.split()[0]) == (0, str(a / "report.html"))
    done = CliRunner().invoke(rl.app, ["report", str(a), str(b), "--out", str(tmp_path / "two.html")])
    assert done.exit_code == 0
    header, _ = unpacked((tmp_path / "two.html").read_text())
    assert [run["name"] for run in header["runs"]] == ["a", "b"]
    assert CliRunner().invoke(rl.app, ["report", str(a), str(b)]).output.split()[0] == str(a / "compared-with-b.html")


def test_rl_report_opens_it_if_there_is_a_browser(tmp_path, monkeypatch):
    """BROWSER is what Python's webbrowser runs, with the address in the place of %s."""
    run, opened = write_run(tmp_path / "a", texts=("t",)), tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setattr(webbrowser, "_tryorder", None)  # it looks again
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    done = CliRunner().invoke(rl.app, ["report", str(run), "--open"])
    assert done.exit_code == 0
    assert opened.read_text().strip() == (run / "report.html").as_uri()
    monkeypatch.setattr(webbrowser, "_tryorder", [])
    done = CliRunner().invoke(rl.app, ["report", str(run), "--open"])
    assert (done.exit_code, (run / "report.html").is_file()) == (2, True)
    assert "--open found no browser" in done.output


@pytest.mark.parametrize("words", [["report", "/no/such/run"], ["report", "RUN", "/no/such/run"]])
def test_a_folder_without_a_run_is_refused(tmp_path, words):
    run = write_run(tmp_path / "a", texts=("t",))
    done = CliRunner().invoke(rl.app, [word.replace("RUN", str(run)) for word in words])
    assert done.exit_code == 2
    assert "/no/such/run is no folder of a run" in done.output


@pytest.mark.parametrize("target", ["none/report.html", "a"])
def test_a_target_that_is_no_file_in_a_folder_is_refused(tmp_path, target):
    run = write_run(tmp_path / "a", texts=("t",))
    done = CliRunner().invoke(rl.app, ["report", str(run), "--out", str(tmp_path / target)])
    assert done.exit_code == 2
    assert f"--out {tmp_path / target} must be a file in a folder that exists" in done.output.replace("\n", " ")


def test_a_report_that_cannot_be_written_beside_the_run_can_be_elsewhere(tmp_path):
    run = write_run(tmp_path / "a", texts=("t",))
    (run / "report.html").mkdir()
    done = CliRunner().invoke(rl.app, ["report", str(run)])
    said = " ".join(done.output.split())
    assert (done.exit_code, "as --out" in said, "trainer.output_dir" in said) == (2, True, False)


def test_a_run_and_the_command_write_the_report_at_once(tmp_path, monkeypatch):
    run, said = write_run(tmp_path / "a"), []
    target, replace = run / "report.html", os.replace

    def replace_second(unfinished, final):
        monkeypatch.setattr(os, "replace", replace)
        said.append(in_a_fork(lambda: write_report([run], target)))
        replace(unfinished, final)

    monkeypatch.setattr(os, "replace", replace_second)
    size = write_report([run], target)
    assert said == [str(size)]
    assert len(target.read_bytes()) == size
    assert not list(run.glob(".*"))


def test_a_report_replaces_reports_alone(tmp_path):
    run, notes = write_run(tmp_path / "a", texts=("t",)), tmp_path / "notes.html"
    notes.write_text("<!doctype html>\n<p>mine</p>\n")
    done = CliRunner().invoke(rl.app, ["report", str(run), "--out", str(notes)])
    assert done.exit_code == 2
    assert f"--out {notes} exists and is no report" in done.output.replace("\n", " ")
    assert notes.read_text() == "<!doctype html>\n<p>mine</p>\n"
    for _ in range(2):
        assert CliRunner().invoke(rl.app, ["report", str(run), "--out", str(tmp_path / "own.html")]).exit_code == 0


def test_a_target_that_is_a_pipe_or_a_link_stays_one(tmp_path):
    run = write_run(tmp_path / "a", texts=("t",))
    os.mkfifo(tmp_path / "pipe")
    done = CliRunner().invoke(rl.app, ["report", str(run), "--out", str(tmp_path / "pipe")])
    assert (done.exit_code, (tmp_path / "pipe").is_fifo()) == (2, True)
    (tmp_path / "link").symlink_to(tmp_path / "there.html")
    done = CliRunner().invoke(rl.app, ["report", str(run), "--out", str(tmp_path / "link")])
    assert (done.exit_code, (tmp_path / "link").is_symlink(), (tmp_path / "there.html").is_file()) == (0, True, True)


def test_a_name_in_another_encoding_is_shown_as_far_as_it_is_text(tmp_path):
    run = write_run(tmp_path / os.fsdecode(b"lat\xe9"), texts=("t",))
    write_report([run], run / "report.html")
    assert "<title>lat\ufffd</title>" in (run / "report.html").read_text(encoding="utf-8")


def test_a_damaged_record_is_named(tmp_path):
    run = write_run(tmp_path / "a", texts=("t",))
    (run / "record" / "odd.jsonl.gz").write_bytes(gzip.compress(msgspec.json.encode({"type": "unheard"})))
    done = CliRunner().invoke(rl.app, ["report", str(run)])
    assert done.exit_code == 2
    assert "can't be read" in done.output


def test_a_configuration_that_is_no_text_is_named(tmp_path):
    run = write_run(tmp_path / "a", texts=("t",))
    (run / "config.yaml").write_bytes(b"\xff")
    done = CliRunner().invoke(rl.app, ["report", str(run)])
    assert done.exit_code == 2
    assert "config.yaml can't be read" in done.output.replace("\n", "")
