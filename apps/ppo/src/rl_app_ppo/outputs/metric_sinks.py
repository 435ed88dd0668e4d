"""`trainer.logger`: metric sinks by name, each in its own thread so that none delays a run."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rl_app_ppo.outputs.run_folder import RECORD
from rl_app_ppo.outputs.sample_tables import SampleSink, SampleTables
from rl_app_ppo.outputs.trackers import MlflowSink, RunFacts, TensorBoardSink, TrackioSink, WandbSink
from rl_protocol import ConfigError
from rl_protocol.counted import counted
from rl_protocol.errors import located_error
from rl_protocol.ports import MetricSink
from rl_protocol.support.options import nearest
from rl_trainer.config.registry import Registry

logger = logging.getLogger(__name__)

CONSOLE = "console"
"""The name of the lines on the screen."""
CAPACITY = 256
"""Steps that may wait for a slow sink."""
CLOSE_S = 30.0
"""Seconds that a sink may take to write its queue."""


@dataclass(frozen=True, slots=True)
class SinkKind:
    """How to open a sink; called in the thread that uses it."""

    open: Callable[[RunFacts], MetricSink]


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
"""Sinks by name; packages add a SinkKind under the entry points `rl_app_ppo.sinks`."""


def logger_names(given: Iterable[str]) -> tuple[str, ...]:
    """The names of `trainer.logger`, without repeats.

    Raises:
        ConfigError: an unknown name.
    """
    names = tuple(dict.fromkeys(given))
    known = (CONSOLE, *SINKS.names())
    for name in names:
        if name not in known and ".py" not in name:  # the registry refuses files by itself
            raise ConfigError(f"trainer.logger must be one of {', '.join(known)}; got {name!r}.{nearest(name, known)}")
        if name != CONSOLE:
            SINKS.get(name)
    return names


class BackgroundSink:
    """MetricSink that runs another one in a thread, and counts the steps that it loses.

    A sink that is a SampleSink also gets the tables of the run's trajectories.

    Args:
        name: name of the sink, for messages.
        open_sink: opens the sink, in the thread.
        capacity: steps that may wait.
        close_s: longest duration of `close`, seconds.
        tables: trajectories of the run; None: there are none.
        say: prints a line when the first step is lost; None: only the log has it.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], MetricSink],
        *,
        capacity: int = CAPACITY,
        close_s: float = CLOSE_S,
        tables: SampleTables | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._say = say
        self._tables = tables
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
        """Queue one step; never waits."""
        if self._closed:
            return
        try:
            self._waiting.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._lose(f"it is too slow: {self._waiting.maxsize} steps are waiting")

    def close(self) -> None:
        """Write all queued steps, within `close_s`; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self._waiting.put(None, timeout=self._close_s)
        except queue.Full:
            self._why = self._why or "it is stuck"
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            logger.warning("The logger %s did not end within %g s and is abandoned.", self._name, self._close_s)
        if self._lost:
            logger.warning("The logger %s did not record %s: %s.", self._name, counted(self._lost, "step"), self._why)

    def _work(self) -> None:
        sink: MetricSink | None = None
        failed = False
        while (item := self._waiting.get()) is not None:
            try:
                if sink is None and not failed:
                    sink = self._open()
                if sink is not None:
                    sink.log(*item)
                    self._log_samples(sink)
                    continue
            except Exception as error:  # noqa: BLE001 - boundary: no error of a logger may end the run
                failed = failed or sink is None
                self._why = located_error(error)
            self._lose(self._why)
        if sink is not None:
            self._log_samples(sink, done=True)
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - see above
                logger.warning("The logger %s could not be closed: %s", self._name, error)

    def _log_samples(self, sink: MetricSink, *, done: bool = False) -> None:
        """Log the tables that are there; after an error no more of them."""
        if self._tables is None or not isinstance(sink, SampleSink):
            return
        try:
            for table in self._tables.new(done=done):
                sink.log_samples(table)
        except Exception as error:  # noqa: BLE001 - see above
            self._tables = None
            logger.warning(
                "The logger %s gets no more tables of samples: %s: %s. The report has them.",
                *(self._name, type(error).__name__, error),
            )

    def _lose(self, why: str) -> None:
        if not self._lost:
            text = f"The logger {self._name} loses steps: {why}. The run continues; metrics.jsonl has all steps."
            logger.warning("%s", text)
            if self._say is not None:
                self._say(f"warning: {text}")
        self._why = why
        self._lost += 1


def open_sinks(
    names: tuple[str, ...], facts: RunFacts, say: Callable[[str], None] | None = None
) -> list[BackgroundSink]:
    """Open the sinks of these names; `say` prints a line about one that loses steps."""
    return [
        BackgroundSink(name, _opening(SINKS.get(name), facts), tables=SampleTables(facts.folder / RECORD), say=say)
        for name in names
        if name != CONSOLE
    ]


def _opening(kind: SinkKind, facts: RunFacts) -> Callable[[], MetricSink]:
    return lambda: kind.open(facts)


def check_installed(names: tuple[str, ...]) -> None:
    """Check that the packages of the loggers are installed.

    Raises:
        ConfigError: one is missing; names the extra to install.
    """
    from importlib.util import find_spec

    for name in ("wandb", "mlflow", "trackio"):
        if name in names and find_spec(name) is None:
            raise ConfigError(
                f"trainer.logger={name} needs the package {name}; install rl-app-ppo[{name}], or remove it."
            )
