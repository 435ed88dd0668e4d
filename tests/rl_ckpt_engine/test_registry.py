"""Names, engine classes, and settings."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import ClassVar

import pytest

import rl_ckpt_engine
from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineRegistry
from rl_ckpt_engine.engines.naive import NaiveEngine
from rl_ckpt_engine.engines.shm import ShmEngine
from rl_ckpt_engine.plugins import PluginPolicy
from rl_protocol.errors import ConfigError
from rl_protocol.plugins import Allowed


class PluginEngine(NaiveEngine):
    name: ClassVar[str] = "plugin"


class FutureEngine(NaiveEngine):
    API_VERSION: ClassVar[int] = 2
    name: ClassVar[str] = "future"


class Points:
    """Stands in for importlib.metadata.entry_points and remembers what was loaded."""

    def __init__(self, **offers: object) -> None:
        self.offers = offers
        self.twice: set[str] = set()
        self.loaded: list[str] = []

    def __call__(self, *, group: str, name: str | None = None) -> list[metadata.EntryPoint]:
        assert group == "rl_ckpt_engine.backends"
        names = [n for n in self.offers if name in (None, n)]
        return [self._point(n) for n in names for _ in range(2 if n in self.twice else 1)]

    def _point(self, name: str) -> metadata.EntryPoint:
        owner = self

        class Point(metadata.EntryPoint):
            def load(self) -> object:
                owner.loaded.append(name)
                offer = owner.offers[name]
                if isinstance(offer, Exception):
                    raise offer
                return offer

        point = Point(name=name, value=f"pkg_{name}:Engine", group="rl_ckpt_engine.backends")
        vars(point).update(dist=SimpleNamespace(name=f"pkg-{name}", version="1.2"))
        return point


EVERYTHING = PluginPolicy(
    allowed={
        "rl_ckpt_engine": {
            "backends": {
                name: Allowed(distribution=f"pkg_{name}", version="1.2")
                for name in ("plugin", "future", "wrong", "broken", "alias")
            }
        }
    }
)


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Points:
    fake = Points(
        plugin=PluginEngine,
        future=FutureEngine,
        wrong=dict,
        broken=ImportError("No module named 'cupy'"),
        alias=PluginEngine,
    )
    monkeypatch.setattr(metadata, "entry_points", fake)
    return fake


def test_built_ins() -> None:
    registry = CheckpointEngineRegistry()
    assert registry.get("shm") is ShmEngine
    assert isinstance(registry.create("naive"), NaiveEngine)
    assert {"naive", "shm"} <= set(registry.names())


def test_a_plug_in_is_loaded_when_its_name_is_asked_for_and_no_other(points: Points) -> None:
    registry = CheckpointEngineRegistry(EVERYTHING)
    assert "plugin" in registry.names()
    registry.get("shm")
    assert points.loaded == []
    assert registry.get("plugin") is PluginEngine
    assert registry.get("plugin") is PluginEngine
    assert points.loaded == ["plugin"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "missing",
            "no checkpoint engine 'missing'; there are alias, broken, cuda_ipc, disk, future, gloo, mooncake, naive, nccl, nixl, plugin, "
            "ray, shm, tcp, wrong",
        ),
        ("future", "API version 2; this is version 1"),
        ("wrong", "no subclass of CheckpointEngine"),
        ("broken", "No module named 'cupy'"),
        ("alias", "calls itself 'plugin'"),
    ],
)
def test_what_can_not_be_used_is_said(points: Points, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointEngineRegistry(EVERYTHING).get(name)


def test_two_owners_of_a_name_are_refused(points: Points) -> None:
    points.twice.add("plugin")
    with pytest.raises(ConfigError, match="Several offer an engine 'plugin'"):
        CheckpointEngineRegistry(EVERYTHING).get("plugin")
    points.offers["shm"] = PluginEngine
    with pytest.raises(ConfigError, match="Several offer an engine 'shm'"):
        CheckpointEngineRegistry(EVERYTHING).get("shm")
    assert points.loaded == []


def test_a_decorated_class_is_known_everywhere(points: Points, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_ckpt_engine.registry._REGISTERED", {})
    registry = CheckpointEngineRegistry(EVERYTHING)

    @CheckpointEngineRegistry.register("mine")
    class Mine(NaiveEngine):
        """Its name is that of the decorator."""

    assert Mine.name == "mine"
    assert registry.get("mine") is CheckpointEngineRegistry(EVERYTHING).get("mine") is Mine
    assert "mine" in registry.names()
    assert NaiveEngine.name == "naive"
    assert CheckpointEngineRegistry.register("mine")(Mine) is Mine  # again
    assert points.loaded == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taken", r"'taken' is taken by .*Other; choose another"),
        ("shm", "'shm' is taken by this package"),
        ("plugin", r"'plugin' is taken by pkg_plugin:Engine of pkg-plugin 1\.2"),
    ],
)
def test_a_name_is_registered_once(points: Points, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.setattr("rl_ckpt_engine.registry._REGISTERED", {})

    @CheckpointEngineRegistry.register("taken")
    class Other(NaiveEngine):
        """The first one."""

    class Mine(NaiveEngine):
        """The second one."""

    with pytest.raises(ConfigError, match=message):
        CheckpointEngineRegistry.register(name)(Mine)
    assert CheckpointEngineRegistry(EVERYTHING).get("taken") is Other


def test_a_package_may_decorate_the_class_that_it_offers(points: Points, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_ckpt_engine.registry._REGISTERED", {})
    monkeypatch.setattr(PluginEngine, "__module__", "pkg_plugin")
    CheckpointEngineRegistry.register("plugin")(PluginEngine)
    assert CheckpointEngineRegistry(EVERYTHING).get("plugin") is PluginEngine


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (FutureEngine, "API version 2"),
        (PluginEngine, "calls itself 'plugin'"),
        (dict, "no subclass of CheckpointEngine"),
    ],
)
def test_what_is_no_engine_of_that_name_is_not_registered(engine: type, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointEngineRegistry.register("other")(engine)
    assert "other" not in CheckpointEngineRegistry(EVERYTHING).names()


@pytest.mark.parametrize("backend", ["", "my.module:Engine", "../engine.py", "a b"])
def test_backend_must_be_a_short_name(backend: str) -> None:
    with pytest.raises(ConfigError, match="short name"):
        CheckpointEngineConfig(backend=backend)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_deadline_must_be_finite_and_positive(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        CheckpointEngineConfig(timeout_s=timeout_s)


def test_everything_exported_is_listed() -> None:
    public = {n for n in vars(rl_ckpt_engine) if not n.startswith("_")}
    modules = {n for n in public if type(vars(rl_ckpt_engine)[n]).__name__ == "module"}
    assert public - modules == set(rl_ckpt_engine.__all__)
    assert rl_ckpt_engine.__version__ == metadata.version("rl-ckpt-engine")


def test_importing_pulls_in_nothing_heavy_and_loads_no_plug_in() -> None:
    code = (
        "from importlib import metadata\n"
        "def no(**_): raise AssertionError('entry points were read at import')\n"
        "metadata.entry_points = no\n"
        "import sys, rl_ckpt_engine, rl_ckpt_engine.testing\n"
        "bad = {'torch', 'ray', 'vllm', 'transformers', 'tensordict', 'pytest'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
