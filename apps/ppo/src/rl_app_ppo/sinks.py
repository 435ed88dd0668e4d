"""Where metrics go beside the screen and metrics.jsonl: sinks by name, each in a thread of its own, so that none blocks or ends a run."""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_app_ppo.outputs import TensorBoardSink
from rl_protocol import ConfigError
from rl_protocol.ports import MetricSink
from rl_trainer.algorithms.registry import Registry

logger = logging.getLogger(__name__)

CONSOLE = "console"
"""The name that stands for the lines on the screen."""
CAPACITY = 256
"""Steps that may wait for a slow sink."""
CLOSE_S = 30.0
"""How long a sink may take to write out what waits for it."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a sink is told of the run."""

    folder: Path
    config: Mapping[str, object]
    """By dotted key."""
    after: int | None = None
    """The step of the checkpoint that the run goes on from."""


@dataclass(frozen=True, slots=True)
class SinkKind:
    """How a sink is made; called in the thread that will use it."""

    open: Callable[[RunFacts], MetricSink]


class WandbSink:
    """MetricSink: Weights & Biases. Offline, into the run folder, unless WANDB_MODE says otherwise; `wandb sync` uploads it later."""

    def __init__(self, facts: RunFacts) -> None:
        import wandb  # comes with an extra of its own

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rl-app-ppo"),
            name=facts.folder.name,
            id=facts.folder.name,
            resume="allow",
            dir=str(facts.folder),
            config=dict(facts.config),
            mode=os.environ.get("WANDB_MODE", "offline"),  # pyright: ignore[reportArgumentType]: checked by wandb
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """End the run in wandb; safe to call twice."""
        self._run.finish()


class MlflowSink:
    """MetricSink: MLflow. Into files in the run folder, unless MLFLOW_TRACKING_URI names a server. A run of the same name is gone on with.

    MLflow takes fewer signs in names than we use: `mean@4` is `mean_at_4` there, and what else it refuses is `_`.
    """

    def __init__(self, facts: RunFacts) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        where = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not where:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # its small package has no database
            where = (facts.folder / "mlflow").as_uri()
        from mlflow import entities  # comes with an extra of its own
        from mlflow.tracking import MlflowClient

        self._entities: Any = entities
        self._client: Any = MlflowClient(tracking_uri=where)
        self._ended = False
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rl-app-ppo")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        found = self._client.search_runs([experiment], f"attributes.run_name = '{facts.folder.name}'")
        run = found[0] if found else self._client.create_run(experiment, run_name=facts.folder.name)
        self._id: str = run.info.run_id
        if found:
            self._client.update_run(self._id, status="RUNNING")
        else:
            texts = {_mlflow_name(key): str(value)[:500] for key, value in facts.config.items()}
            self._client.log_batch(self._id, params=[entities.Param(key, text) for key, text in texts.items()])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        now = time.time_ns() // 1_000_000
        values = [self._entities.Metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        """End the run in MLflow; safe to call twice."""
        if not self._ended:
            self._ended = True
            self._client.set_terminated(self._id)


class TrackioSink:
    """MetricSink: trackio. Into a database in the run folder (or TRACKIO_DIR), which `trackio show` reads; never over the network. A run of the same
    name is gone on with."""

    def __init__(self, facts: RunFacts) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(facts.folder / "trackio"))  # read when it is imported
        from trackio.run import Run  # pyright: ignore[reportMissingImports]: an extra that is in no default group

        self._run: Any = Run(  # trackio.init prints, and looks for servers in the environment
            url=None,
            client=None,
            project="rl-app-ppo",
            name=facts.folder.name,
            run_id=facts.folder.name,
            config=dict(facts.config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Have trackio write what it holds; safe to call twice."""
        self._run.finish()


def _mlflow_name(name: str) -> str:
    plain = re.sub(r"[^\w\-. /:]", "_", name.replace("@", "_at_"))
    return "/".join(part for part in plain.split("/") if part.strip("."))


SINKS: Registry[SinkKind] = Registry(
    "trainer.logger",
    "rl_app_ppo.sinks",
    SinkKind,
    {
        "tensorboard": SinkKind(lambda facts: TensorBoardSink(facts.folder / "tensorboard", facts.after)),
        "wandb": SinkKind(WandbSink),
        "mlflow": SinkKind(MlflowSink),
        "trackio": SinkKind(TrackioSink),
    },
    {},
)
"""By name; an installed package offers a SinkKind of its own under the entry points `rl_app_ppo.sinks`."""


def logger_names(text: str) -> tuple[str, ...]:
    """`trainer.logger`, parsed.

    Raises:
        ConfigError: a name that nobody offers.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name != CONSOLE:
            SINKS.get(name)
    return names


class BackgroundSink:
    """MetricSink that hands another one its work in a thread. What that one can't keep up with, or fails at, is counted and said once.

    Args:
        name: of the sink, for messages.
        open_sink: makes it, in the thread.
        capacity: steps that may wait.
        close_s: longest `close` may take, seconds.
    """

    def __init__(
        self, name: str, open_sink: Callable[[], MetricSink], *, capacity: int = CAPACITY, close_s: float = CLOSE_S
    ) -> None:
        self._name = name
        self._open = open_sink
        self._close_s = close_s
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(capacity)
        self._lost = 0
        self._why = ""
        self._thread = threading.Thread(target=self._work, name=f"sink-{name}", daemon=True)
        self._thread.start()
        self._closed = False

    @property
    def lost(self) -> int:
        """Steps that were not recorded."""
        return self._lost

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Leave one step to the thread; never waits."""
        if self._closed:
            return
        try:
            self._waiting.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._lose(f"it is too slow: {self._waiting.maxsize} steps are waiting")

    def close(self) -> None:
        """Have everything written that waits, for a bounded time; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self._waiting.put(None, timeout=self._close_s)
        except queue.Full:
            self._why = self._why or "it is stuck"
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            logger.warning("The logger %s did not end within %g s and is left behind.", self._name, self._close_s)
        if self._lost:
            logger.warning("The logger %s did not record %d steps: %s.", self._name, self._lost, self._why)

    def _work(self) -> None:
        sink: MetricSink | None = None
        failed = False
        while (item := self._waiting.get()) is not None:
            try:
                if sink is None and not failed:
                    sink = self._open()
                if sink is not None:
                    sink.log(*item)
                    continue
            except Exception as error:  # noqa: BLE001 - a named boundary: whatever a logger raises must not end the run
                failed = failed or sink is None
                self._why = f"{type(error).__name__}: {error}"
            self._lose(self._why)
        if sink is not None:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - see above
                logger.warning("The logger %s could not be closed: %s", self._name, error)

    def _lose(self, why: str) -> None:
        if not self._lost:
            logger.warning(
                "The logger %s loses steps: %s. The run goes on; metrics.jsonl has them all.", self._name, why
            )
        self._why = why
        self._lost += 1


def open_sinks(names: tuple[str, ...], facts: RunFacts) -> list[BackgroundSink]:
    """The sinks of these names."""
    return [BackgroundSink(name, _opening(SINKS.get(name), facts)) for name in names if name != CONSOLE]


def _opening(kind: SinkKind, facts: RunFacts) -> Callable[[], MetricSink]:
    return lambda: kind.open(facts)


def check_installed(names: tuple[str, ...]) -> None:
    """Refuse a logger whose package is missing, before anything starts.

    Raises:
        ConfigError: says what to install.
    """
    from importlib.util import find_spec

    for name in ("wandb", "mlflow", "trackio"):
        if name in names and find_spec(name) is None:
            raise ConfigError(
                f"trainer.logger={name} needs the package {name}; install rl-app-ppo[{name}], or take it out."
            )
