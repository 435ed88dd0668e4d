"""`DataPlaneSuite` on a plane where unpickling fails in the client and in every server."""

from __future__ import annotations

import _pickle
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rl_protocol.ports import DataPlane
from rl_protocol.testing.data_plane_suite import DataPlaneSuite
from rl_transferqueue import LocalPlane, TransferQueueConfig, connect, start_local_plane

POISON = """
import _pickle, os, pathlib, pickle

def poisoned(*args, **kwargs):
    raise RuntimeError("something was unpickled")

for module in (pickle, _pickle):
    for name in ("load", "loads", "Unpickler"):
        setattr(module, name, poisoned)
pickle._load = pickle._loads = pickle._Unpickler = poisoned
pathlib.Path(os.environ["POISONED_DIR"], str(os.getpid())).touch()
"""


class TestWithoutPickle(DataPlaneSuite):
    plane: LocalPlane

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _plane(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder, marks = tmp_path_factory.mktemp("poison"), tmp_path_factory.mktemp("marks")
        (folder / "sitecustomize.py").write_text(POISON)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(
                "PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
            )
            patch.setenv("POISONED_DIR", str(marks))
            with start_local_plane(TransferQueueConfig(capacity_mb=64, segment_mb=1)) as cls.plane:
                assert {int(mark.name) for mark in marks.iterdir()} >= set(cls.plane.pids)
                yield

    @pytest.fixture(autouse=True)
    def _poison_this_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def poisoned(*_: object, **__: object) -> object:
            raise RuntimeError("something was unpickled")

        for module in (pickle, _pickle):
            for name in ("load", "loads", "Unpickler"):
                monkeypatch.setattr(module, name, poisoned)

    @asynccontextmanager
    async def open_plane(self) -> AsyncIterator[DataPlane]:
        async with await connect(self.plane.descriptor) as client:
            yield client
        async with await connect(self.plane.descriptor) as cleaner:
            for partition in (await cleaner.stats()).rows:
                await cleaner.clear(partition)


def test_the_poison_works(tmp_path: Path) -> None:
    """A process that is started like the plane above can't unpickle."""
    (tmp_path / "sitecustomize.py").write_text(POISON)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "POISONED_DIR": str(tmp_path)}
    code = "import pickle; pickle.loads(pickle.dumps([1]))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "something was unpickled" in done.stderr
