"""Metric sinks of TensorBoard, Weights & Biases, MLflow and trackio; the last three have tables."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_app_ppo.outputs.run_folder import writing
from rl_app_ppo.outputs.sample_tables import COLUMNS, SampleTable

logger = logging.getLogger(__name__)
_TRACKIO_DIR = "TRACKIO_DIR"
_EVENTS = "events.out.tfevents."
SAMPLES = "samples"
"""Name of the tables of trajectories."""
LISTED_TABLES = 50
"""Tables that the page of an MLflow run lists; a tag has their names, and its length is limited."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a sink gets to know about the run."""

    folder: Path
    config: Mapping[str, object]
    """Dotted key -> value."""
    after: int | None = None
    """The step of the checkpoint that the run resumes from."""


class TensorBoardSink:
    """MetricSink: an event file for `tensorboard --logdir`.

    It writes each record itself: tensorboard's EventFileWriter writes from a thread and only prints
    errors. If a run resumes `after` a step, readers discard later steps of earlier files.
    """

    def __init__(self, folder: Path, after: int | None = None) -> None:
        from tensorboard.compat.proto import (
            event_pb2,
            summary_pb2,
        )  # takes a second to import
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2  # generated at run time, unknown to type checkers
        self._summary: Any = summary_pb2
        self._folder = folder
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / _events_name(folder)).open("wb", buffering=0)
            self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if after is not None:
            self._write(step=after + 1, session_log=self._event.SessionLog(status=self._event.SessionLog.START))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one event with all metrics."""
        values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=self._summary.Summary(value=values))

    def close(self) -> None:
        """Close the file; safe to call twice."""
        with writing(self._folder):
            self._file.close()

    def _write(self, **content: object) -> None:
        if not self._file.closed:
            with writing(self._folder):
                self._records.write(self._event.Event(wall_time=time.time(), **content).SerializeToString())


class WandbSink:
    """MetricSink: Weights & Biases.

    Offline, into the run folder, unless WANDB_MODE is set; `wandb sync` uploads it later. Steps of
    wandb only grow, so a table is logged with the newest; its rows have their own step.
    """

    def __init__(self, facts: RunFacts) -> None:
        import wandb  # an optional dependency

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rl-app-ppo"),
            name=facts.folder.name,
            id=facts.folder.name,
            resume="allow",
            dir=str(facts.folder),
            config=dict(facts.config),
            mode=os.environ.get("WANDB_MODE", "offline"),  # pyright: ignore[reportArgumentType]: checked by wandb
            # one that the caller of `train()` has stays the active one
            settings=wandb.Settings(silent=True, console="off", reinit="create_new"),
        )
        self._table: Any = wandb.Table
        self._step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        self._step = step
        self._run.log(dict(metrics), step=step)

    def log_samples(self, table: SampleTable) -> None:
        """Record one table."""
        rows = [list(row) for row in table.rows]
        self._run.log({SAMPLES: self._table(columns=list(COLUMNS), data=rows)}, step=self._step)

    def close(self) -> None:
        """End the run in wandb; safe to call twice."""
        self._run.finish()


class MlflowSink:
    """MetricSink: MLflow.

    Writes files in the run folder, unless MLFLOW_TRACKING_URI names a server. Reuses a run with the
    same name. MLflow allows fewer characters in names: `mean@4` becomes `mean_at_4`, and every
    other character that it refuses becomes `_`. A table is the artifact `samples/STEP.json`.
    """

    def __init__(self, facts: RunFacts) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        where = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not where:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # its small package has no database
            where = (facts.folder / "mlflow").as_uri()
        from mlflow import entities  # an optional dependency
        from mlflow.tracking import MlflowClient

        self._entities: Any = entities
        self._client: Any = MlflowClient(tracking_uri=where)
        self._ended = False
        self._tables: list[dict[str, str]] = []
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

    def log_samples(self, table: SampleTable) -> None:
        """Record one table, as `mlflow.log_table` does, which needs pandas."""
        path = f"{SAMPLES}/{table.step:06d}.json"
        self._client.log_text(self._id, json.dumps({"columns": COLUMNS, "data": table.rows}), path)
        self._tables = [*self._tables, {"path": path, "type": "table"}][-LISTED_TABLES:]
        self._client.set_tag(self._id, "mlflow.loggedArtifacts", json.dumps(self._tables))

    def close(self) -> None:
        """End the run in MLflow; safe to call twice."""
        if not self._ended:
            self._ended = True
            self._client.set_terminated(self._id)


class TrackioSink:
    """MetricSink: trackio.

    Writes a database in the run folder (or TRACKIO_DIR) for `trackio show`, never over the network.
    Reuses a run with the same name. trackio chooses its folder when it is imported, so that a later
    run of this process writes into that of the first one, with a warning.
    """

    def __init__(self, facts: RunFacts) -> None:
        given, wanted = os.environ.get(_TRACKIO_DIR), facts.folder / "trackio"
        os.environ[_TRACKIO_DIR] = given or str(wanted)
        try:
            from trackio.run import Run  # pyright: ignore[reportMissingImports]: an extra that is in no default group
            from trackio.table import Table  # pyright: ignore[reportMissingImports]: as above
            from trackio.utils import TRACKIO_DIR  # pyright: ignore[reportMissingImports]: as above
        finally:
            if not given:
                del os.environ[_TRACKIO_DIR]
        if Path(given or wanted) != TRACKIO_DIR:
            logger.warning(
                "trackio writes to %s, not to %s: it was imported before in this process, where it chose its folder. Train in another "
                "process, or set %s for all runs before the first one.",
                TRACKIO_DIR,
                given or wanted,
                _TRACKIO_DIR,
            )
        self._table: Any = Table
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

    def log_samples(self, table: SampleTable) -> None:
        """Record one table."""
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in table.rows]
        self._run.log({SAMPLES: self._table(data=rows)}, step=table.step)

    def close(self) -> None:
        """Flush trackio's buffer; safe to call twice."""
        self._run.finish()


def _events_name(folder: Path) -> str:
    """The name of a new event file: readers take files in the order of their names, so its time is
    later than those of the others, also within one second and after the clock was set back.
    """
    others = (path.name.removeprefix(_EVENTS).split(".")[0] for path in folder.glob(f"{_EVENTS}*"))
    newest = max((int(seconds) for seconds in others if seconds.isdecimal()), default=0)
    return f"{_EVENTS}{max(int(time.time()), newest + 1)}.{platform.node() or 'host'}.{os.getpid()}"


def _mlflow_name(name: str) -> str:
    plain = re.sub(r"[^\w\-. /:]", "_", name.replace("@", "_at_"))
    return "/".join(part for part in plain.split("/") if part.strip("."))
