"""Monitoring of a live plane: the status command, the Prometheus endpoint, and counters."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forked import in_a_fork
from polling import until_async
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from rl_protocol import BatchData, ColumnSpec, ConfigError, MissingDataError, OutputError, PlaneTimeout, dense, ragged
from rl_protocol.ports import DataPlane
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_protocol.wire import plan
from rl_transferqueue import LocalPlane, PlaneDescriptor, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.controller.column_counters import ColumnCounters
from rl_transferqueue.launch.find_plane import DESCRIPTOR_VARIABLE, find_plane, running_planes
from rl_transferqueue.observe import prometheus
from rl_transferqueue.observe.cli import look, main
from rl_transferqueue.observe.prometheus import metered, serve_metrics
from rl_transferqueue.observe.status import describe
from rl_transferqueue.transport.request_counters import RequestCounters

SMALL = TransferQueueConfig(num_storage_units=1, capacity_mb=4, segment_mb=1)
BATCH = BatchData({"x": dense(np.ones((2, 500), np.float32)), "r": ragged([[1, 2, 3], [4]], "int64")})
"""2 rows: x has 4000 bytes, r has 4 numbers and 3 offsets of 8 bytes each."""


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPlane]:
    """Yield the only plane in its directory for temporary files, after `work` has run on it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv(DESCRIPTOR_VARIABLE, raising=False)
    with start_local_plane(SMALL) as plane:
        asyncio.run(work(plane.descriptor))
        yield plane


async def work(descriptor: PlaneDescriptor) -> None:
    """Make 3 puts of BATCH, 2 gets of 2 rows, 1 wait that times out, and 1 clear of 2 rows."""
    async with await connect(descriptor) as client:
        for i in range(3):
            meta = await client.put("train", [f"k{i}", f"m{i}"], BATCH)
        await client.get(meta)
        await client.get(meta, ["r"])
        with pytest.raises(PlaneTimeout):
            await client.wait_ready("train", count=99, timeout_s=0.01)
        await client.clear("train", meta.keys)


# --------------------------------------------------------------------------------
# Counters
def test_the_tally_of_a_server_by_hand() -> None:
    tally = RequestCounters()
    for nanoseconds, nbytes in ((100, 10), (400, 20), (100, 30)):
        tally.served("Commit", nanoseconds, nbytes)
    tally.served("Clear", 5, 1)
    tally.failed(PlaneTimeout("late"))
    tally.failed(PlaneTimeout("late again"))
    commit = tally.operations()["Commit"]
    assert (commit.requests, commit.nanoseconds, commit.longest_nanoseconds, commit.bytes_received) == (3, 600, 400, 60)
    assert list(tally.operations()) == ["Commit", "Clear"]
    assert tally.errors() == {"PlaneTimeout": 2}


def test_the_tally_of_columns_by_hand() -> None:
    import msgspec

    tally = ColumnCounters()
    for _ in range(2):
        tally.put(msgspec.msgpack.encode(plan(BATCH)))
    tally.located(("r", "y"), 5)
    counts = {name: (c.rows_written, c.bytes_written, c.rows_located) for name, c in tally.columns().items()}
    assert counts == {"x": (4, 8000, 0), "r": (4, 2 * (32 + 24), 5), "y": (0, 0, 5)}


def test_the_controller_counts_what_its_clients_do(alone: LocalPlane) -> None:
    async def body() -> None:
        async with await connect(alone.descriptor) as client:
            waiting = asyncio.ensure_future(client.wait_ready("never", count=1, timeout_s=60))

            async def one_waits() -> bool:
                found = await client.metrics()
                return (found.sessions, found.waiting) == (1, 1)

            await until_async(one_waits, "the first client is gone and this one waits")
            metrics = await client.metrics()
            waiting.cancel()
            assert metrics.operations["Commit"].requests == 3
            assert metrics.operations["Locate"].requests == 2
            assert metrics.operations["Clear"].requests == 1
            assert metrics.operations["Hello"].requests == 2
            for count in metrics.operations.values():
                assert 0 < count.longest_nanoseconds <= count.nanoseconds
                assert count.bytes_received > 0
            assert metrics.errors == {"PlaneTimeout": 1}
            x, r = metrics.columns["x"], metrics.columns["r"]
            assert (x.rows_written, x.bytes_written, x.rows_located) == (6, 12000, 2)
            assert (r.rows_written, r.bytes_written, r.rows_located) == (6, 168, 4)

    asyncio.run(body())


def test_puts_that_wait_for_memory_are_told_from_requests_that_wait_for_rows(alone: LocalPlane) -> None:
    async def body(url: str) -> tuple[str, dict[str, float]]:
        async with await connect(alone.descriptor) as client:
            full = BatchData({"x": dense(np.ones((1, 3 << 20), np.uint8))})
            await client.put("full", ["a"], full)
            waiting = [
                asyncio.ensure_future(client.put("full", ["b"], full, timeout_s=60)),
                *(asyncio.ensure_future(client.wait_ready("never", count=1, timeout_s=60)) for _ in range(2)),
            ]

            async def three_wait() -> bool:
                return (await client.metrics()).waiting == 3

            await until_async(three_wait, "the put and both others wait")
            shown = describe(await look(client, alone.descriptor)), await asyncio.to_thread(scrape, url)
            for call in waiting:
                call.cancel()
            return shown

    with serve_metrics(alone.descriptor) as server:
        text, values = asyncio.run(body(server.url))
    assert "waiting   2 for rows, 1 for memory (3.0 MiB)" in text
    names = ("rl_tq_waiting_requests", "rl_tq_waiting_puts", "rl_tq_waiting_bytes")
    assert [values[name] for name in names] == [2, 1, 3 << 20]


# --------------------------------------------------------------------------------
# Finding a plane
def test_the_one_plane_that_runs_is_found(alone: LocalPlane) -> None:
    assert find_plane() == alone.descriptor
    (path,) = running_planes()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OutputError, match=r"/nowhere/plane\.json: No such file"):
        alone.descriptor.save(Path("/nowhere/plane.json"))


def test_a_descriptor_is_saved_and_loaded_by_a_path_or_its_text(
    alone: LocalPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    alone.descriptor.save("named.json")
    assert PlaneDescriptor.load("named.json") == PlaneDescriptor.load(tmp_path / "named.json") == alone.descriptor
    with pytest.raises(OutputError, match=r"other\.json can't be read"):
        PlaneDescriptor.load("other.json")


def test_a_named_plane_is_found(alone: LocalPlane, tmp_path: Path) -> None:
    alone.descriptor.save(tmp_path / "named.json")
    with start_local_plane(SMALL) as other:
        with pytest.raises(
            ConfigError, match=rf"2 planes run on this host: .*--descriptor PATH, or {DESCRIPTOR_VARIABLE}"
        ):
            find_plane()
        assert find_plane(tmp_path / "named.json") == alone.descriptor
        other.descriptor.save(tmp_path / "other.json")
        assert find_plane(environment={DESCRIPTOR_VARIABLE: str(tmp_path / "other.json")}) == other.descriptor
        assert find_plane(tmp_path / "named.json", {DESCRIPTOR_VARIABLE: "/nowhere"}) == alone.descriptor
    assert find_plane() == alone.descriptor


def test_what_is_no_plane_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(DESCRIPTOR_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="No plane of this user runs on this host"):
        find_plane()
    with pytest.raises(ConfigError, match=r"nowhere\.json can't be read: No such file"):
        find_plane(tmp_path / "nowhere.json")
    (tmp_path / "broken.json").write_bytes(b'{"controller": "\xff"}')
    with pytest.raises(ConfigError, match=r"broken\.json: Not a plane descriptor"):
        find_plane(tmp_path / "broken.json")


def test_a_plane_that_was_killed_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with start_local_plane(SMALL) as plane:
        leftover = tmp_path / "rltq-leftover"
        leftover.mkdir()
        plane.descriptor.save(leftover / "plane.json")
        assert len(running_planes()) == 2
    assert running_planes() == {}


# --------------------------------------------------------------------------------
# The command
def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl_transferqueue.observe.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_status_says_what_the_plane_holds_and_has_done(alone: LocalPlane) -> None:
    done = run("status")
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    assert f"controller pid {alone.pids[0]}, 1 storage unit\n" in done.stdout
    assert lines["errors"] == ["errors", "PlaneTimeout", "1"]
    assert lines["train"] == ["train", "4"]
    assert lines["Commit"][1:3] == ["3", "-"]
    assert lines["x"] == ["x", "6", "11.7", "KiB", "2"]
    assert "of 4.0 MiB (" in done.stdout


def test_status_for_programs(alone: LocalPlane) -> None:
    status = json.loads(run("status", "--json").stdout)
    assert (status["controller_pid"], status["storage_units"]) == (alone.pids[0], 1)
    assert (status["rows"], status["bytes_capacity"]) == ({"train": 4}, 4 << 20)
    assert status["errors"] == {"PlaneTimeout": 1}
    assert status["operations"]["Commit"]["requests"] == 3
    assert status["columns"]["x"] == {"rows_written": 6, "bytes_written": 12000, "rows_located": 2}


def test_status_again_and_again_until_interrupted(alone: LocalPlane) -> None:
    command = [sys.executable, "-m", "rl_transferqueue.observe.cli", "status", "--every", "0.05", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=300)
    requests = [look["operations"]["GetStats"]["requests"] for look in seen[1:]]
    assert requests[1] == requests[0] + 1
    assert (process.returncode, complaints) == (130, "")


def test_status_ends_quietly_when_nobody_reads_it(alone: LocalPlane) -> None:
    command = [sys.executable, "-m", "rl_transferqueue.observe.cli", "status", "--every", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("plane")
        process.stdout.close()
        complaints = process.stderr.read()
        assert (process.wait(timeout=300), complaints) == (141, "")


def test_a_plane_that_cannot_be_found_or_is_gone_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--descriptor", str(tmp_path / "no.json")]) == 2
    assert "can't be read" in capsys.readouterr().err
    with start_local_plane(SMALL) as plane:
        plane.descriptor.save(tmp_path / "gone.json")
    assert main(["status", "--descriptor", str(tmp_path / "gone.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["status", "--every", "0"])
    assert "positive number of seconds" in capsys.readouterr().err


def test_metrics_without_the_extra_say_what_to_install(alone: LocalPlane, tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ModuleNotFoundError('no', name='prometheus_client')")
    done = run("metrics", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert done.returncode == 2
    assert "prometheus_client is not installed; pip install 'rl-transferqueue[metrics]'" in done.stderr


# --------------------------------------------------------------------------------
# Prometheus
def scrape(url: str) -> dict[str, float]:
    """Return the value of each sample by its name, followed by its label values in brackets."""
    text = urllib.request.urlopen(url, timeout=60).read().decode()
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_endpoint_says_what_the_plane_says(alone: LocalPlane) -> None:
    with serve_metrics(alone.descriptor) as server:
        assert server.url.startswith("http://127.0.0.1:")
        first = scrape(server.url)
        assert first["rl_tq_up"] == 1
        assert first["rl_tq_rows[train]"] == 4
        assert first["rl_tq_capacity_bytes"] == 4 << 20
        assert 0 < first["rl_tq_used_bytes"] < 4 << 20
        assert first["rl_tq_requests_total[Commit]"] == 3
        assert first["rl_tq_errors_total[PlaneTimeout]"] == 1
        assert first["rl_tq_written_bytes_total[x]"] == 12000
        assert first["rl_tq_located_rows_total[r]"] == 4
        assert first["rl_tq_request_longest_seconds[Commit]"] <= first["rl_tq_request_seconds_total[Commit]"]
        assert scrape(server.url)["rl_tq_requests_total[GetStats]"] == first["rl_tq_requests_total[GetStats]"] + 1
        alone.close()
        assert scrape(server.url) == {"rl_tq_up": 0}
    with pytest.raises(urllib.error.URLError):
        scrape(server.url)
    server.close()


def test_a_port_that_is_taken_is_named(alone: LocalPlane) -> None:
    with serve_metrics(alone.descriptor) as server:
        port = int(server.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: .*Choose another port"):
            serve_metrics(alone.descriptor, port=port)
    with pytest.raises(ConfigError, match="99999"):
        serve_metrics(alone.descriptor, port=99999)


def test_the_command_serves_until_interrupted(alone: LocalPlane) -> None:
    command = [sys.executable, "-m", "rl_transferqueue.observe.cli", "metrics", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1]
        assert scrape(url)["rl_tq_rows[train]"] == 4
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=300) == ("", "")
    assert process.returncode == 0


def test_a_process_meters_its_own_calls_on_any_plane() -> None:
    async def body(registry: CollectorRegistry) -> None:
        plane = metered(MemoryDataPlane(), registry)
        meta = await plane.put("p", ["a", "b"], BATCH, tags=[{"n": 1}, {}])
        await plane.get(meta)
        await plane.get(meta, ["x"])
        await plane.wait_ready("p", count=1, fields=["x"], timeout_s=60)
        with pytest.raises(MissingDataError):
            await plane.get(meta, ["ghost"])
        assert len(await plane.list_rows("p", where={"n": 1})) == 1
        assert await plane.clear("p") == 2
        assert (await plane.stats()).rows["p"] == 0
        assert plane.traffic().data_written == BATCH.nbytes

    registry = CollectorRegistry()
    asyncio.run(body(registry))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("rl_tq_client_bytes_total", operation="put", column="x") == 4000
    assert value("rl_tq_client_bytes_total", operation="get", column="x") == 8000
    assert value("rl_tq_client_bytes_total", operation="get", column="r") == 56
    assert value("rl_tq_client_seconds_count", operation="get") == 3
    assert value("rl_tq_client_seconds_count", operation="wait_ready") == 1
    assert value("rl_tq_client_errors_total", operation="get", error="MissingDataError") == 1


def test_a_fork_meters_though_another_thread_was_beginning_to(monkeypatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(prometheus._CallMetrics):
        def __init__(self, registry: CollectorRegistry) -> None:
            begun.set()
            if threading.current_thread() is meters:
                assert go_on.wait(60)
            super().__init__(registry)

    def meter() -> None:
        metered(MemoryDataPlane(), CollectorRegistry())

    monkeypatch.setattr(prometheus, "_CallMetrics", Slow)
    meters = threading.Thread(target=meter)
    meters.start()
    try:
        assert begun.wait(60)
        assert in_a_fork(meter) == "None"
    finally:
        go_on.set()
        meters.join(60)


def test_every_call_of_the_port_is_metered() -> None:
    async def body() -> None:
        plane = metered(MemoryDataPlane(), registry)
        await plane.alloc([ColumnSpec(name="x", kind="dense", dtype="uint8")], 1)
        await plane.put("p", ["a"], BATCH.select_rows([0]))
        await plane.claim("p", ["a"], task="t")
        await plane.watch("p", since=0, timeout_s=1)
        await plane.consumption_status("p", task="t")
        await plane.production_status("p", fields=["x"])
        await plane.row_hosts("p", ["a"])
        await plane.reset_consumption("p", task="t")
        await plane.unload("p", ["a"])
        await plane.get(await plane.wait_ready("p", count=1, timeout_s=1))
        await plane.list_rows("p")
        await plane.clear("p")
        await plane.stats()
        await plane.close()

    registry = CollectorRegistry()
    asyncio.run(body())
    calls = {name for name, method in vars(DataPlane).items() if inspect.iscoroutinefunction(method)}
    assert len(calls) == 15
    counts = {name: registry.get_sample_value("rl_tq_client_seconds_count", {"operation": name}) for name in calls}
    assert counts == dict.fromkeys(calls, 1)


def test_two_planes_are_metered_in_one_registry() -> None:
    async def body() -> None:
        for _ in range(2):
            await metered(MemoryDataPlane(), registry).put("p", ["a", "b"], BATCH)

    registry = CollectorRegistry()
    asyncio.run(body())
    assert registry.get_sample_value("rl_tq_client_seconds_count", {"operation": "put"}) == 2
    assert registry.get_sample_value("rl_tq_client_bytes_total", {"operation": "put", "column": "x"}) == 8000
