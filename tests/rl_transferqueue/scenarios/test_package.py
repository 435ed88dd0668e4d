"""The package as a whole: names, imports, no pickle, settings, and doctests."""

from __future__ import annotations

import asyncio
import dataclasses
import doctest
import importlib
import pickle
import pkgutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rl_transferqueue
from rl_protocol import BatchData, CapacityTimeout, ConfigError, ObjectColumn, dense
from rl_protocol.ports import DataPlane
from rl_protocol.support.options import spec_of
from rl_transferqueue import LocalPlane, TransferQueueConfig, connect, start_local_plane

MODULES = sorted(m.name for m in pkgutil.walk_packages(rl_transferqueue.__path__, "rl_transferqueue."))
SOURCE = Path(rl_transferqueue.__file__).parent


def test_all_equals_reality() -> None:
    public = {
        name
        for name, value in vars(rl_transferqueue).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }
    assert public | {"portal"} == set(rl_transferqueue.__all__)
    assert rl_transferqueue.__all__ == sorted(rl_transferqueue.__all__)


def test_import_loads_nothing_heavy_and_does_nothing() -> None:
    code = (
        "import sys, threading, rl_transferqueue, rl_transferqueue.launch.server_process, logging\n"
        "print(sorted({'torch', 'ray', 'tensordict', 'pytest', 'zmq.asyncio', 'pickle5', 'cloudpickle',"
        " 'rl_protocol.support.plugins'} & set(sys.modules)),"
        " threading.active_count(), logging.getLogger().handlers)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[] 1 []"


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("compat", "torch", "compat"),
        ("compat.kv", "tensordict", "compat"),
        ("consume.streaming_dataset", "torch", "torch"),
        ("observe.prometheus", "prometheus_client", "metrics"),
    ],
)
def test_a_module_without_its_extra_says_what_to_install(module: str, missing: str, extra: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import rl_transferqueue.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: {missing} is not installed; pip install 'rl-transferqueue[{extra}]'"
    )


@pytest.mark.parametrize("name", ["rl_transferqueue", *MODULES])
def test_doctests(name: str) -> None:
    if name.startswith("rl_transferqueue.backends."):
        pytest.importorskip(name, exc_type=ImportError)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize(
    ("file", "number"), [("README.md", 0), ("README.md", 1), ("docs/streaming.md", 0), ("docs/durable.md", 0)]
)
def test_readme_examples_run(file: str, number: int, readme_code: Callable[[str, int, str], str]) -> None:
    code = readme_code("packages/rl-transferqueue", number, file)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_module_can_unpickle() -> None:
    for path in SOURCE.rglob("*.py"):
        code = path.read_text()
        for word in ("import pickle", "recv_pyobj", "send_pyobj", "marshal", "eval(", "exec("):
            assert word not in code, f"{path.name} uses {word}"


def test_nothing_is_unpickled_by_a_client(plane: LocalPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(*_: object, **__: object) -> object:
        raise AssertionError("something was unpickled")

    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            data = BatchData({"o": ObjectColumn.from_values([{"a": 1}, "b"]), "x": dense([1.0, 2.0])})
            meta = await client.put("p", ["a", "b"], data, tags=[{"n": 1}, {}])
            got = await client.get(await client.wait_ready("p", count=2, fields=meta.fields, timeout_s=60))
            assert got.objects("o").values() == [{"a": 1}, "b"]

    monkeypatch.setattr(pickle, "loads", poisoned)
    monkeypatch.setattr(pickle, "load", poisoned)
    monkeypatch.setattr(pickle, "Unpickler", poisoned)
    asyncio.run(main())


def test_the_client_is_a_data_plane(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            assert isinstance(client, DataPlane)

    asyncio.run(main())


# --------------------------------------------------------------------------------
# Settings
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_storage_units", 0),
        ("num_storage_units", 257),
        ("capacity_mb", 1),
        ("segment_mb", 0),
        ("timeout_s", 0.0),
        ("timeout_s", float("nan")),
    ],
)
def test_settings_out_of_range_are_named(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting} must be"):
        TransferQueueConfig(**{setting: value})  # type: ignore[arg-type]


def test_every_setting_is_explained_and_plain() -> None:
    for setting in dataclasses.fields(TransferQueueConfig):
        assert spec_of(setting).help
        assert setting.type in ("int", "float", "str", "bool")


def test_the_runtime_directory_must_be_there_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not there"):
        start_local_plane(TransferQueueConfig(), tmp_path / "ghost")
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match=r"runtime directory .* (107|103) bytes"):
        start_local_plane(TransferQueueConfig(), deep)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match=r"temporary folder \(TMPDIR\) .* (107|103) bytes; set TMPDIR"):
        start_local_plane(TransferQueueConfig())
    assert list(deep.iterdir()) == []


def test_the_configured_deadline_is_the_default() -> None:
    config = TransferQueueConfig(num_storage_units=1, capacity_mb=1, segment_mb=1, timeout_s=0.05)
    most_of_it = BatchData({"x": dense(np.zeros((1, 3 << 18), np.uint8))})

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["a"], most_of_it)
            with pytest.raises(CapacityTimeout, match=r"within 0\.0"):
                await client.put("p", ["b"], most_of_it)

    with start_local_plane(config) as plane:
        asyncio.run(main(plane))
