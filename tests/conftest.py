"""What holds for every test, however and on whatever machine pytest was started."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Property tests run on shared machines: how long one example takes says nothing. At a desk every run looks for new counter-examples;
# in CI the examples are the same for the same code, so that a red run is about the change and can be repeated.
settings.register_profile(
    "shared", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared")

# Ray's workers run in the environment of the tests. Where pytest was started by `uv run`, Ray would have uv make one for each of them, which takes
# a minute; it looks at this when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# A shell starts its background jobs with SIGINT ignored, and so would be every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each of these markers belongs to an environment of its own: a test with two would run where one of them can't."""
    for item in items:
        if len(asked := [name for name in ("slow", "gpu", "vllm", "bridge") if item.get_closest_marker(name)]) > 1:
            raise pytest.UsageError(
                f"{item.nodeid} is marked {' and '.join(asked)}: leave the one that says where it can run."
            )


@pytest.fixture(autouse=True)
def _contexts_of_vllm(request: pytest.FixtureRequest) -> Iterator[None]:
    """An engine of vLLM's that did not start leaves its ZeroMQ context to the garbage collector, which warns of it: here, not in a later test.

    What was there before the test is not searched: with vLLM imported, that alone takes most of a second.
    """
    if not request.node.get_closest_marker("vllm"):
        yield
        return
    gc.freeze()
    yield
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unclosed context", ResourceWarning)
        gc.collect()
    gc.unfreeze()


@pytest.fixture(scope="session")
def demo_models(request):
    """Folder of demo models that were made by an earlier test or an earlier run of pytest: see rl_app_ppo.demo.store for when one is made anew."""
    return request.config.cache.mkdir("demo_models")


@pytest.fixture(scope="session")
def base_model(demo_models):
    """A demo model after a warm-up of a few steps: enough to train on, quick to make."""
    from rl_app_ppo.demo.settings import WarmUpSettings
    from rl_app_ppo.demo.warmup import cached_base_model

    return cached_base_model(demo_models, WarmUpSettings(max_steps=80, check_every=80, validation_size=64))


@pytest.fixture
def install_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """(group, name="module:attribute", ...) -> as an installer does it: entry points of one more distribution, `someones1` 1.0, `someones2` ..., and,
    unless allowed=False, as an operator does it: what RL_PLUGINS names allows them. Returns the folder that holds it."""
    from rl_trainer.algorithms.registry import installed

    monkeypatch.delenv("RL_PLUGINS", raising=False)
    count = 0

    def install(group: str, *, allowed: bool = True, **points: str) -> Path:
        nonlocal count
        count += 1
        distribution, site = f"someones{count}", tmp_path / f"site-{count}"
        info = site / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        offered = "".join(f"{name} = {value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{offered}")
        monkeypatch.syspath_prepend(site)
        if allowed:
            with (tmp_path / "plugins.toml").open("a") as file:
                file.writelines(f'[{group}.{name}]\ndistribution = "{distribution}"\n' for name in points)
            monkeypatch.setenv("RL_PLUGINS", str(tmp_path / "plugins.toml"))
        installed.cache_clear()
        return site

    yield install
    installed.cache_clear()
