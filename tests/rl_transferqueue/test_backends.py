"""Backends: names, the same contract for each backend, and cleanup."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from forked import forked
from network_helpers import MIB, rows_of

from rl_protocol import CapacityTimeout, ConfigError, DataPlaneError, PlaneLostError
from rl_protocol.ports import DataPlane
from rl_protocol.testing.data_plane_suite import DataPlaneSuite
from rl_transferqueue import Client, LocalPlane, TransferQueueConfig, check_plane, connect, start_local_plane
from rl_transferqueue.backends import backend_names, load_backend

ENTRY_POINTS = """[rl_transferqueue.backends]
directory = rltq_directory:Backend
broken = rltq_ghost:Backend
wrong = rltq_directory:Path
twice = rltq_directory:Backend
"""
TWICE = "[rl_transferqueue.backends]\ntwice = rltq_directory:Store\nsly = rltq_directory:Backend\n"
ALLOWED = "".join(
    f'[rl_transferqueue.backends.{name}]\ndistribution = "{package}"\n'
    for name, package in (("directory", "rltq_directory"), ("broken", "rltq_directory"), ("wrong", "rltq_directory"))
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, readme_code: Callable[..., str]) -> Iterator[Path]:
    """Provide packages with backends, some of them allowed, and yield a folder for blocks.

    `directory` is the example of docs/guides/data_plane.md.

    This process and its child processes find the packages as if they were installed.
    """
    site = tmp_path_factory.mktemp("site")
    (site / "rltq_directory.py").write_text(readme_code("docs/guides", 0, "data_plane.md"))
    for name, points in (("rltq_directory", ENTRY_POINTS), ("rltq_other", TWICE)):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
    blocks = site / "blocks"
    blocks.mkdir()
    (site / "plugins.toml").write_text(ALLOWED)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        patch.setenv("RL_PLUGINS", str(site / "plugins.toml"))
        yield blocks
    importlib.invalidate_caches()


# --------------------------------------------------------------------------------
# Names
def test_unknown_backend_names_list_what_is_installed(tmp_path: Path) -> None:
    assert {"memory", "simple", "ray", "mooncake"} <= set(backend_names())
    with pytest.raises(
        ConfigError, match=r"no backend 'mooncak'. Did you mean 'mooncake'\? Installed are .*memory.*ray"
    ):
        start_local_plane(TransferQueueConfig(backend="mooncak"), tmp_path)
    with pytest.raises(ConfigError, match=r"no backend 'zzz'\. Installed are"):
        start_local_plane(TransferQueueConfig(backend="zzz"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_backends_that_can_not_be_loaded_say_why(installed: Path) -> None:
    assert "directory" in backend_names()
    for name, match in (
        (
            "broken",
            r"'broken' \(rltq_ghost:Backend of rltq_directory 1\.0\) can't be loaded: ModuleNotFoundError: No module named 'rltq_ghost'",
        ),
        ("wrong", r"'wrong' \(rltq_directory:Path of rltq_directory 1\.0\) is .*Path\('\.'\), which is no Backend"),
        ("twice", r"Several packages offer a backend 'twice': rltq_.*:.* of rltq_.* 1\.0, rltq_"),
    ):
        with pytest.raises(ConfigError, match=match):
            load_backend(name)
        with pytest.raises(ConfigError, match=match):
            check_plane(TransferQueueConfig(backend=name))


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("", r'\[rl_transferqueue\.backends\.sly\] distribution = "rltq_other"'),
        ('distribution = "rltq_directory"', "comes from another distribution than allowed"),
        ('distribution = "rltq_other"\nversion = "2.0"', r"has version 1\.0; allowed is 2\.0"),
        (
            f'distribution = "rltq_other"\nsha256 = "{"0" * 64}"',
            r"can't be pinned: it is installed without a file list",
        ),
    ],
)
def test_a_backend_loads_where_the_operator_allows_it_and_no_plane_starts_without(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, message: str
) -> None:
    monkeypatch.setenv("RL_PLUGINS", str(tmp_path / "plugins.toml"))
    (tmp_path / "plugins.toml").write_text(f"[rl_transferqueue.backends.sly]\n{listed}\n" if listed else "")
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.delitem(sys.modules, "rltq_directory", raising=False)
    for asked in (lambda: load_backend("sly"), lambda: start_local_plane(TransferQueueConfig(backend="sly"), runtime)):
        with pytest.raises(ConfigError, match=message):
            asked()
    assert "rltq_directory" not in sys.modules, "nothing of it was imported"
    assert list(runtime.iterdir()) == []


def test_a_backend_that_can_not_be_hosted_ends_the_start(installed: Path, tmp_path: Path) -> None:
    with pytest.raises(PlaneLostError, match=r"(?s)unit-0 process .* ended with status 1.*must be an absolute path"):
        start_local_plane(TransferQueueConfig(backend="directory", backend_address="blocks"), tmp_path)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------
# The contract
class StoredSuite(DataPlaneSuite):
    """One plane for all tests; each test must leave the plane and its store empty."""

    plane: LocalPlane

    @asynccontextmanager
    async def open_plane(self) -> AsyncIterator[DataPlane]:
        client = await connect(self.plane.descriptor)
        try:
            yield client
        finally:
            await client.close()
            async with await connect(self.plane.descriptor) as cleaner:
                for partition in (await cleaner.stats()).rows:
                    await cleaner.clear(partition)
                await settles(cleaner, 0)
            self.check_empty()

    def check_empty(self) -> None:
        """Check that the store is empty."""


async def settles(client: Client, nbytes: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        stats = await client.stats()
        if (stats.bytes_used, stats.bytes_reserved) == (nbytes, 0):
            return
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.02)


class TestDirectoryBackend(StoredSuite):
    blocks: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _plane(cls, installed: Path) -> Iterator[None]:
        cls.blocks = installed
        config = TransferQueueConfig(backend="directory", backend_address=str(installed), capacity_mb=64)
        with start_local_plane(config) as cls.plane:
            yield

    def check_empty(self) -> None:
        assert list(self.blocks.iterdir()) == []


DYING_CLIENT = """
import asyncio, sys
import numpy as np
from rl_protocol import BatchData, dense
from rl_transferqueue import PlaneDescriptor, connect
from rl_transferqueue.wire.messages import Reserve, Reserved

async def main():
    client = await connect(PlaneDescriptor.from_json(sys.argv[1]))
    rows = BatchData({"x": dense(np.full((1, 1 << 20), 7, np.uint8))})
    await client.put("p", ["committed"], rows)
    span = (await client._controller.call(Reserve(1 << 20, 0.0), Reserved, 60)).span
    await client._memory.write(span, None, rows, 60)
    print("up", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_client_leaves_what_it_committed_and_nothing_else(installed: Path) -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await settles(client, MIB)
            meta = await client.list_rows("p")
            assert (await client.get(meta, ["x"])).dense("x").values.min() == 7
            await client.clear("p")
            await settles(client, 0)

    config = TransferQueueConfig(backend="directory", backend_address=str(installed), capacity_mb=8)
    with start_local_plane(config) as plane:
        command = [sys.executable, "-c", DYING_CLIENT, plane.descriptor.to_json()]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as dying:
            assert dying.stdout is not None
            assert dying.stdout.readline() == b"up\n"
            assert len(list(installed.iterdir())) == 2
            dying.kill()
        asyncio.run(main(plane))
    assert list(installed.iterdir()) == []


def test_a_full_backend_makes_puts_wait_and_loses_nothing(installed: Path) -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            first = await client.put("p", ["a"], rows_of(1, 2 * MIB))
            with pytest.raises(CapacityTimeout, match=r"TransferQueueConfig\.capacity_mb"):
                await client.put("p", ["b"], rows_of(2, 2 * MIB), timeout_s=0.1)
            waiting = asyncio.ensure_future(client.put("p", ["b"], rows_of(2, 2 * MIB), timeout_s=60))
            await asyncio.sleep(0.05)
            assert (await client.get(first)).dense("x").values.max() == 1
            await client.clear("p", ["a"])
            assert (await client.get(await waiting)).dense("x").values.min() == 2
            await client.clear("p")

    config = TransferQueueConfig(
        backend="directory", backend_address=str(installed), num_storage_units=1, capacity_mb=3
    )
    with start_local_plane(config) as plane:
        asyncio.run(main(plane))


def test_a_store_that_fails_fails_its_call_alone(installed: Path) -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            meta = await client.put("p", ["a", "b"], rows_of(1, MIB).repeat(2))
            shutil.rmtree(installed)
            with pytest.raises(DataPlaneError, match="gone"):
                await client.put("p", ["c"], rows_of(1, MIB))
            installed.mkdir()  # noqa: ASYNC240
            assert (await client.list_rows("p")).keys == ("a", "b")
            with pytest.raises(DataPlaneError, match="gone"):
                await client.get(meta)
            again = await client.put("p", ["c"], rows_of(3, MIB))
            assert (await client.get(again)).dense("x").values.min() == 3
            await client.clear("p")

    config = TransferQueueConfig(backend="directory", backend_address=str(installed), capacity_mb=8)
    with start_local_plane(config) as plane:
        asyncio.run(main(plane))


# --------------------------------------------------------------------------------
# The memory backend
def test_a_plane_in_memory_starts_no_process_and_ends_with_its_threads(caplog: pytest.LogCaptureFixture) -> None:
    descriptors: list[int] = []
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    had = set(children.read_text().split())  # a child of an earlier test may still end

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            meta = await client.put("p", ["a"], rows_of(1, MIB))
            view = (await client.get(meta)).dense("x").values
            now = set(children.read_text().split())  # noqa: ASYNC240 - /proc does not block
            assert now <= had
            plane.close()
            with pytest.raises(PlaneLostError):
                await client.list_rows("p", timeout_s=60)
            assert view.all()
        with pytest.raises(PlaneLostError):
            await connect(plane.descriptor)

    for _ in range(3):
        asyncio.run(main(start_local_plane(TransferQueueConfig(backend="memory", capacity_mb=8))))
        gc.collect()
        deadline = time.monotonic() + 60  # ZeroMQ closes its sockets in another thread
        while (count := len(list(Path("/proc/self/fd").iterdir()))) > min(descriptors, default=1 << 20):
            assert time.monotonic() < deadline, (count, descriptors)
            time.sleep(0.02)
        descriptors.append(count)
    assert not caplog.messages


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_plane_in_memory_ends_while_a_forked_process_lives(tmp_path: Path) -> None:
    """The process has the pipe by which the servers are ended, and the lock of the journal."""
    journal = str(tmp_path / "journal")
    config = TransferQueueConfig(backend="memory", capacity_mb=8, durability="commit", journal_dir=journal)
    threads = set(threading.enumerate())
    plane = start_local_plane(config)
    servers = set(threading.enumerate()) - threads
    assert servers
    with forked():
        plane.close()
        assert not [thread for thread in servers if thread.is_alive()]
        start_local_plane(config).close()


# --------------------------------------------------------------------------------
# Ray and Mooncake
@pytest.mark.slow
class TestRayBackend(StoredSuite):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _plane(cls) -> Iterator[None]:
        ray = pytest.importorskip("ray")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
            ray.init(
                address="local", num_cpus=1, include_dashboard=False, object_store_memory=160 * MIB, log_to_driver=False
            )
            try:
                address = ray.get_runtime_context().gcs_address
                config = TransferQueueConfig(backend="ray", backend_address=address, capacity_mb=64)
                with start_local_plane(config, start_timeout_s=120) as cls.plane:
                    yield
            finally:
                ray.shutdown()

    def test_committed_rows_outlive_the_client_that_put_them(self) -> None:
        command = [sys.executable, "-c", DYING_CLIENT, self.plane.descriptor.to_json()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as dying:
            assert dying.stdout is not None
            assert dying.stdout.readline() == b"up\n"
            dying.kill()

        async def main() -> None:
            async with await connect(self.plane.descriptor) as client:
                await settles(client, MIB)
                got = await client.get(await client.list_rows("p"), ["x"])
                assert got.dense("x").values.min() == 7
                await client.clear("p")
                await settles(client, 0)
                assert got.dense("x").values.min() == 7

        asyncio.run(main())


@pytest.mark.slow
class TestMooncakeBackend(StoredSuite):
    """Uses TCP on loopback, with a Mooncake master that the class starts."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _plane(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        mooncake = pytest.importorskip("mooncake", reason="needs the extra [mooncake]")
        try:
            import mooncake.store
        except ImportError as error:
            pytest.skip(f"mooncake is installed but does not load: {error} (Debian: apt-get install libibverbs1)")
        port, metrics = (_free_port() for _ in range(2))
        log = (tmp_path_factory.mktemp("mooncake") / "master.log").open("wb")
        command = [
            str(Path(mooncake.__file__).parent / "mooncake_master"),
            *("-rpc_address=127.0.0.1", f"-rpc_port={port}", "-enable_metric_reporting=false"),
            *("-metrics_host=127.0.0.1", f"-metrics_port={metrics}"),
        ]
        with pytest.MonkeyPatch.context() as patch, log, subprocess.Popen(command, stdout=log, stderr=log) as master:
            patch.setenv("RL_TQ_MOONCAKE_HOST", "127.0.0.1")
            try:
                _wait_for(port)
                config = TransferQueueConfig(backend="mooncake", backend_address=f"127.0.0.1:{port}", capacity_mb=64)
                with start_local_plane(config) as cls.plane:
                    yield
            finally:
                master.terminate()

    def test_a_block_of_many_megabytes(self) -> None:
        async def main() -> None:
            async with await connect(self.plane.descriptor) as client:
                meta = await client.put("p", ["a"], rows_of(5, 28 * MIB))
                assert np.unique((await client.get(meta)).dense("x").values).tolist() == [5]
                await client.clear("p")

        asyncio.run(main())

    def test_without_a_master_the_start_says_what_to_set(self, tmp_path: Path) -> None:
        with pytest.raises(
            (ConfigError, PlaneLostError, DataPlaneError), match=r"TransferQueueConfig\.backend_address"
        ):
            start_local_plane(TransferQueueConfig(backend="mooncake"), tmp_path)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline, "mooncake_master did not come up"
            time.sleep(0.1)
        else:
            return
