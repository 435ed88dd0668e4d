"""Plug-ins load only if the operator allows them; else the error says why.

The tests use a real package.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from ckpt_fakes import Sink, Source, model
from trust import trust

from rl_ckpt_engine import (
    CheckpointEngine,
    CheckpointEngineConfig,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    PluginPolicy,
    ReceiverEndpoint,
    SenderEndpoint,
    load_policy,
)
from rl_ckpt_engine.plugins import load_plugin
from rl_ckpt_engine.testing import EngineConformance
from rl_protocol.errors import ConfigError
from rl_protocol.support.plugins import ALLOW_FILE, Allowed, fingerprint

EXAMPLE = Path(__file__).with_name("example_plugin")
MODULE = "ckpt_example_plugin"
CUSTOM = CheckpointEngineConfig(backend="example", custom_backend_module="example", checkpoint_manager_class="example")


def install(site: Path, *, name: str = "ckpt-example-plugin", version: str = "1.0", module: str = MODULE) -> Path:
    """Write the example as an installer does; return its module's folder."""
    source = (EXAMPLE / "src" / MODULE / "__init__.py").read_text()
    package, info = site / module, site / f"{name.replace('-', '_')}-{version}.dist-info"
    for folder in (package, info):
        folder.mkdir(parents=True)
    points = re.findall(
        r'^\[project.entry-points."(.+)"\]\n(\w+) = "\w+:(\w+)"$', (EXAMPLE / "pyproject.toml").read_text(), re.M
    )
    (package / "__init__.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("".join(f"[{g}]\n{n} = {module}:{c}\n" for g, n, c in points))
    files = [package / "__init__.py", info / "METADATA", info / "entry_points.txt", info / "RECORD"]
    (info / "RECORD").write_text("".join(f"{file.relative_to(site)},,\n" for file in files))
    return package


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv(ALLOW_FILE, raising=False)
    yield folder
    for module in [m for m in sys.modules if m.startswith((MODULE, "loose"))]:
        del sys.modules[module]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Replace the registry with an empty one for the test."""
    found: dict[str, type] = {}
    monkeypatch.setattr("rl_ckpt_engine.registry._REGISTERED", found)
    return found


def allowed(distribution: str = "ckpt_example_plugin", **facts: str) -> PluginPolicy:
    entry = {"example": Allowed(distribution=distribution, **facts)}
    return PluginPolicy(allowed={"rl_ckpt_engine": {"backends": entry, "managers": entry}})


def pin() -> str:
    return fingerprint(metadata.distribution("ckpt-example-plugin"))


def test_engine_and_manager_of_a_plug_in_do_a_sync(site: Path) -> None:
    install(site)
    registry = CheckpointEngineRegistry(allowed(version="1.0", sha256=pin()))
    engine, manager_class = registry.resolve(CUSTOM), registry.manager(CUSTOM)
    assert engine.__module__ == manager_class.__module__ == MODULE
    source, sink = Source(model(3)), Sink(model(0))
    sender, receiver = SenderEndpoint(engine(), source), ReceiverEndpoint(registry.create("example"), sink)
    manager = manager_class(sender, [receiver], CUSTOM)
    assert asyncio.run(manager.update_weights(7)).version == 7
    assert manager.versions == (7,)
    assert engine.sent == 1
    assert sink.loaded == {w.name: w.data.tobytes() for w in source.weights}
    sender.close()
    receiver.close()


class TestExampleEngine(EngineConformance):
    @pytest.fixture(autouse=True)
    def _installed(self, site: Path) -> None:
        install(site)

    def make_engine(self) -> CheckpointEngine:
        return CheckpointEngineRegistry(allowed()).create("example")


def refused(policy: PluginPolicy, config: CheckpointEngineConfig = CUSTOM) -> str:
    """Check that both hooks refuse and the plug-in is not imported; return the engine's message."""
    with pytest.raises(ConfigError):
        CheckpointEngineRegistry(policy).manager(config)
    with pytest.raises(ConfigError) as error:
        CheckpointEngineRegistry(policy).resolve(config)
    assert MODULE not in sys.modules
    return str(error.value)


def test_what_is_installed_and_not_allowed_does_not_load(site: Path) -> None:
    install(site)
    message = refused(PluginPolicy())
    assert "is installed but not allowed" in message
    assert '[rl_ckpt_engine.backends.example] distribution = "ckpt-example-plugin"' in message
    with pytest.raises(ConfigError, match="not allowed"):
        CheckpointEngineRegistry().get("example")
    assert "example" in CheckpointEngineRegistry().names()


def test_another_version_distribution_or_content_is_refused(site: Path) -> None:
    package = install(site)
    good = pin()
    assert "has version 1.0; allowed is 2.0" in refused(allowed(version="2.0"))
    assert "comes from another distribution" in refused(allowed("somebody-elses"))
    with (package / "__init__.py").open("a") as file:
        file.write("\n")
    message = refused(allowed(sha256=good))
    assert "was changed on disk" in message
    assert good in message
    assert pin() in message


def test_byte_code_beside_pinned_sources_is_not_run(site: Path, tmp_path: Path) -> None:
    package = install(site)
    source = package / "__init__.py"
    good, text, status = pin(), source.read_text(), source.stat()
    evil = text.replace("with counters", "with a hacker")
    assert len(evil) == len(text)
    source.write_text(evil)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(package)], check=True, timeout=300)
    source.write_text(text)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert load_plugin("backends", "example", allowed()).__doc__ == "Shared memory with a hacker.", "the trap works"
    del sys.modules[MODULE]
    assert load_plugin("backends", "example", allowed(sha256=good)).__doc__ == "Shared memory with counters."


def test_a_module_that_shadows_a_pinned_one_is_refused(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site)
    good, shadow = pin(), tmp_path / "shadow"
    shutil.copytree(site / MODULE, shadow / MODULE)
    monkeypatch.syspath_prepend(shadow)
    assert "not one of its files" in refused(allowed(sha256=good))


def test_an_editable_install_can_not_be_pinned(site: Path) -> None:
    install(site)
    (info,) = site.glob("*.dist-info")
    (info / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    assert "can't be pinned" in refused(allowed(sha256="0" * 64))
    CheckpointEngineRegistry(allowed()).resolve(CUSTOM)


def test_two_packages_of_one_name_are_refused(site: Path) -> None:
    install(site)
    install(site, name="other-plugin", module="ckpt_example_plugin_two")
    message = refused(allowed())
    assert "ckpt-example-plugin 1.0" in message
    assert "other-plugin 1.0" in message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "API_VERSION: ClassVar[int] = 1",
            "API_VERSION: ClassVar[int] = 2",
            "was written for API version 2; this is version 1",
        ),
        ('name: ClassVar[str] = "example"', 'name: ClassVar[str] = "other"', "has the name 'other'"),
        (
            "import annotations\n",
            "import annotations\nimport cupy_that_is_missing\n",
            "No module named 'cupy_that_is_missing'",
        ),
        ("class ExampleEngine(ShmEngine)", "class Unused(ShmEngine)", "no attribute 'ExampleEngine'"),
        (
            "class ExampleEngine(ShmEngine):",
            "ExampleEngine = dict\n\n\nclass Unused(ShmEngine):",
            "not a subclass of CheckpointEngine",
        ),
    ],
)
def test_what_can_not_be_used_is_said(site: Path, old: str, new: str, message: str) -> None:
    source = install(site) / "__init__.py"
    source.write_text(source.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(message)):
        CheckpointEngineRegistry(allowed()).resolve(CUSTOM)


def test_a_manager_must_be_one(site: Path) -> None:
    source = install(site) / "__init__.py"
    text = source.read_text()
    source.write_text(text.replace("class ExampleManager(CheckpointEngineManager)", "class ExampleManager"))
    with pytest.raises(ConfigError, match="not a subclass of CheckpointEngineManager"):
        CheckpointEngineRegistry(allowed()).manager(CUSTOM)
    assert CheckpointEngineRegistry().manager(CheckpointEngineConfig()) is CheckpointEngineManager


def test_unknown_names_list_what_is_installed(site: Path) -> None:
    install(site)
    config = CheckpointEngineConfig(checkpoint_manager_class="mine", custom_backend_module="mine", backend="mine")
    message = refused(allowed(), config)
    assert "No installed package offers 'mine'" in message
    assert "installed are example" in message


def test_a_plug_in_does_not_replace_an_engine_of_this_package(site: Path) -> None:
    install(site)
    with pytest.raises(ConfigError, match="can't replace the engine 'shm'"):
        CheckpointEngineRegistry(allowed()).resolve(
            CheckpointEngineConfig(backend="shm", custom_backend_module="example")
        )
    with pytest.raises(ConfigError, match="has the name 'example'"):
        CheckpointEngineRegistry(allowed()).resolve(
            CheckpointEngineConfig(backend="mine", custom_backend_module="example")
        )


def test_module_paths_load_with_the_switch_alone_and_loudly(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(site)
    paths = CheckpointEngineConfig(
        backend="example",
        custom_backend_module=f"{MODULE}:ExampleEngine",
        checkpoint_manager_class=f"{MODULE}:ExampleManager",
    )
    assert "is installed but not allowed" in refused(allowed(), paths)
    unsafe = CheckpointEngineRegistry(load_policy({}, allow_unsafe_plugins=True))
    with caplog.at_level(logging.WARNING):
        assert unsafe.resolve(paths).name == "example"
        assert unsafe.manager(paths).__name__ == "ExampleManager"
    assert caplog.text.count("UNSAFE") == 2
    missing = CheckpointEngineConfig(backend="example", custom_backend_module=f"{MODULE}:Missing")
    with pytest.raises(ConfigError, match="can't be loaded"):
        CheckpointEngineRegistry(load_policy({}, allow_unsafe_plugins=True)).resolve(missing)


@pytest.mark.parametrize("value", ["../x.py", "a b", ".x", "a..b", "pkg.mod:", ":X", "pkg/mod:X"])
def test_settings_hold_names_and_no_code(value: str) -> None:
    for key in ("custom_backend_module", "checkpoint_manager_class"):
        with pytest.raises(ConfigError, match=f"{key} must be the short name"):
            CheckpointEngineConfig(**{key: value})


# -- module paths, as verl's settings have them
REGISTERING = """
from rl_ckpt_engine import CheckpointEngineRegistry
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from ckpt_example_plugin import ExampleManager

@CheckpointEngineRegistry.register("mine")
class MyEngine(ShmEngine):
    API_VERSION = 1
"""
PATHS = CheckpointEngineConfig(
    backend="mine",
    custom_backend_module=f"{MODULE}.engines",
    checkpoint_manager_class=f"{MODULE}.engines.ExampleManager",
)


def install_registering(site: Path) -> Path:
    """Install a distribution whose module registers its engine, without an entry point for it."""
    package = install(site)
    (package / "engines.py").write_text(REGISTERING)
    record = site / "ckpt_example_plugin-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text() + f"{MODULE}/engines.py,,\n")
    return package


def paths_allowed(distribution: str = "ckpt_example_plugin", **facts: str) -> PluginPolicy:
    entry = Allowed(distribution=distribution, **facts)
    backends, managers = {PATHS.custom_backend_module: entry}, {PATHS.checkpoint_manager_class: entry}
    return PluginPolicy(allowed={"rl_ckpt_engine": {"backends": backends, "managers": managers}})


def test_a_module_that_registers_its_engine_loads_by_its_path(site: Path, registered: dict[str, type]) -> None:
    install_registering(site)
    registry = CheckpointEngineRegistry(paths_allowed(version="1.0", sha256=pin()))
    engine, manager_class = registry.resolve(PATHS), registry.manager(PATHS)
    assert (engine.__name__, engine.name, manager_class.__name__) == ("MyEngine", "mine", "ExampleManager")
    assert registry.resolve(PATHS) is registry.get("mine") is engine
    source, sink = Source(model(3)), Sink(model(0))
    sender, receiver = SenderEndpoint(engine(), source), ReceiverEndpoint(engine(), sink)
    manager = manager_class(sender, [receiver], PATHS)
    assert asyncio.run(manager.update_weights(2)).version == 2
    assert sink.loaded == {w.name: w.data.tobytes() for w in source.weights}
    sender.close()
    receiver.close()


def test_a_module_path_needs_leave_like_any_plug_in(site: Path, registered: dict[str, type]) -> None:
    package = install_registering(site)
    said = refused(allowed(), PATHS)  # the entry points are allowed, the paths are not
    assert f'[rl_ckpt_engine.backends."{MODULE}.engines"] distribution = "ckpt-example-plugin"' in said
    assert "comes from another distribution" in refused(paths_allowed("other-package"), PATHS)
    assert "has version 1.0; allowed is 2.0" in refused(paths_allowed(version="2.0"), PATHS)
    pinned = paths_allowed(sha256=pin())
    (package / "engines.py").write_text(REGISTERING + "#")
    assert "was changed on disk" in refused(pinned, PATHS)
    assert registered == {}


def test_a_module_of_no_distribution_loads_only_unsafely(site: Path, registered: dict[str, type]) -> None:
    install(site)
    (site / "loose").mkdir()
    (site / "loose" / "engines.py").write_text(REGISTERING)
    for path in ("loose.engines", "os.path"):
        config = CheckpointEngineConfig(backend="mine", custom_backend_module=path)
        with pytest.raises(ConfigError, match="no installed distribution contains that module"):
            CheckpointEngineRegistry(paths_allowed()).resolve(config)
    assert registered == {}
    unsafe = CheckpointEngineRegistry(load_policy({}, allow_unsafe_plugins=True))
    loose = CheckpointEngineConfig(backend="mine", custom_backend_module="loose.engines")
    assert unsafe.resolve(loose).name == "mine"
    delta = CheckpointEngineConfig(backend="delta-mine", custom_backend_module="loose.engines")
    assert unsafe.resolve(delta).name == "delta-mine"
    with pytest.raises(ConfigError, match=r"registers no engine 'other'; registered are mine"):
        unsafe.resolve(CheckpointEngineConfig(backend="other", custom_backend_module="loose.engines"))


def test_the_operators_file_names_a_path_in_quotes(tmp_path: Path) -> None:
    file = tmp_path / "plugins.toml"
    file.write_text('[rl_ckpt_engine.backends."my_pkg.engines"]\ndistribution = "my-package"\n')
    policy = load_policy({ALLOW_FILE: str(file)})
    assert policy.allowed["rl_ckpt_engine"]["backends"] == {"my_pkg.engines": Allowed(distribution="my-package")}


# --------------------------------------------------------------------------------
# the allow-list


def test_the_allow_list_is_a_file_of_the_operator(tmp_path: Path) -> None:
    file = tmp_path / "plugins.toml"
    file.write_text(
        '[rl_ckpt_engine.backends.example]\ndistribution = "ckpt-example-plugin"\nversion = "1.0"\nsha256 = "ab"\n'
        '[rl_trainer.hooks.other]\ndistribution = "of-another-package"\n'
    )
    policy = load_policy({ALLOW_FILE: str(file)})
    entry = Allowed(distribution="ckpt-example-plugin", version="1.0", sha256="ab")
    assert policy.allowed == {"rl_ckpt_engine": {"backends": {"example": entry}}}, (
        "what workers are told is what concerns them"
    )
    assert load_policy({}) == PluginPolicy()
    for text, message in [
        ('[backends.x]\ndistribution = "y"', r"Expected `object`, got `str`"),
        ('[rl_ckpt_engine.backends.x]\ndist = "y"', "unknown field `dist`"),
        ("[rl_ckpt_engine.backends.x]", "missing required field `distribution`"),
        ("= nonsense", "can't be read"),
        ("allow_unsafe_plugins = true", r"Expected `object`, got `bool`"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_policy({ALLOW_FILE: str(file)})
    file.write_text("")
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="is world-writable"):
        load_policy({ALLOW_FILE: str(file)})
    with pytest.raises(ConfigError, match="can't be read"):
        load_policy({ALLOW_FILE: str(tmp_path / "missing")})


WORKER = """
import sys, msgspec
from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineRegistry, PluginPolicy
policy = msgspec.json.decode(sys.argv[1], type=PluginPolicy) if len(sys.argv) > 1 else None
config = CheckpointEngineConfig(backend="example", custom_backend_module="example", checkpoint_manager_class="example")
registry = CheckpointEngineRegistry(policy)
print(registry.resolve(config).__name__, registry.manager(config).__name__)
"""


def test_driver_and_workers_load_the_same_by_policy_or_by_environment(site: Path, tmp_path: Path) -> None:
    install(site)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def worker(*arguments: str, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", WORKER, *arguments],
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]

    policy = msgspec.json.encode(allowed(sha256=pin())).decode()
    assert worker(policy) == "ExampleEngine ExampleManager"
    printed = subprocess.run(
        [sys.executable, "-m", "rl_protocol.support.plugins", "rl_ckpt_engine"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    assert f'sha256 = "{pin()}"' in printed
    file = tmp_path / "plugins.toml"
    file.write_text(printed)
    assert worker(**{ALLOW_FILE: str(file)}) == "ExampleEngine ExampleManager"
    assert "is installed but not allowed" in worker()


@pytest.mark.slow
def test_the_example_builds_and_its_wheel_installs(site: Path, tmp_path: Path) -> None:
    program = [shutil.which("uv")] if shutil.which("uv") else [sys.executable, "-m", "uv"]
    shutil.copytree(EXAMPLE, tmp_path / "example")
    subprocess.run(
        [*program, "build", "--wheel", "-o", str(tmp_path / "out"), str(tmp_path / "example")],
        check=True,
        capture_output=True,
        timeout=280,
    )
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    registry = CheckpointEngineRegistry(allowed(version="1.0", sha256=pin()))
    assert registry.resolve(CUSTOM).name == "example"
    assert registry.manager(CUSTOM).__name__ == "ExampleManager"


def test_both_hooks_take_a_file_of_code_that_is_allowed(tmp_path):
    """`allow_unsafe_plugins` does not extend to files."""
    file = tmp_path / "mine.py"
    file.write_text((EXAMPLE / "src" / MODULE / "__init__.py").read_text())
    config = CheckpointEngineConfig(
        backend="example",
        custom_backend_module=f"{file}:ExampleEngine",
        checkpoint_manager_class=f"{file}:ExampleManager",
    )
    refusing = CheckpointEngineRegistry(PluginPolicy(allow_unsafe_plugins=True))
    for key, use in (("custom_backend_module", refusing.resolve), ("checkpoint_manager_class", refusing.manager)):
        with pytest.raises(ConfigError, match=rf"CheckpointEngineConfig\.{key}=.*add --trust {file}"):
            use(config)
    trust(file)
    registry = CheckpointEngineRegistry(PluginPolicy())
    assert registry.resolve(config).__name__ == "ExampleEngine"
    assert issubclass(registry.manager(config), CheckpointEngineManager)
