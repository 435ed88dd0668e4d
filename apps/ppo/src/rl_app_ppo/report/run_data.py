"""Reads what the report shows of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_app_ppo.config.full_keys import with_full_keys
from rl_app_ppo.outputs.metrics_file import read_metrics
from rl_app_ppo.outputs.run_folder import files_of
from rl_app_ppo.outputs.run_record import read_run
from rl_app_ppo.report.packing import ColumnPlace, Packer
from rl_protocol import ConfigError
from rl_trainer.record.read_record import Record
from rl_trainer.record.record_rows import TrajectoryRow

MOST_TOKENS = 500_000
"""Response tokens in a report; of a run that has recorded more, evenly spread steps are shown."""
_SCALE = 1000
"""Token columns are integers: thousandths, within the range of 16 bits."""
_TOKEN_COLUMNS = ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_prob", "entropy")


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as read from its folder."""

    name: str
    config: str
    metrics: Sequence[dict[str, float]]
    record: Record

    @classmethod
    def read(cls, folder: Path) -> RunData:
        """Read a run, which may be running or was killed.

        Raises:
            ConfigError: it is no folder of a run, or a file can't be read.
        """
        files = files_of(folder)
        try:
            config = files.config.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The configuration {files.config} can't be read: {error}.") from error
        metrics, record = read_metrics(files.metrics), read_run(folder, MOST_TOKENS)
        name = os.fsencode(files.folder.name).decode(errors="replace")  # it may be in another encoding
        return cls(name=name, config=config, metrics=metrics, record=record)


def packed_run(run: RunData, packer: Packer) -> dict[str, object]:
    """The header of a run; its columns go to the packer."""
    record = run.record
    end = record.end
    return {
        "name": run.name,
        "outcome": {"state": "unfinished", "text": ""} if end is None else {"state": end.outcome, "text": end.text},
        "total": record.starts[-1].steps if record.starts else 0,
        "began": record.starts[0].at if record.starts else 0.0,
        "attempts": len(record.starts),
        "config": run.config,
        "rule": with_full_keys(record.rule),
        "every": record.every,
        "metrics": _metrics(run.metrics, packer),
        "phases": [(row.name, row.began, row.at) for row in record.phases],
        "alarms": [(row.at, row.name, with_full_keys(row.text)) for row in record.alarms],
        "ends": {
            "step": packer.add("i4", [row.step for row in record.steps]),
            "at": packer.add("f8", [row.at for row in record.steps]),
        },
        "spans": _spans(record, packer),
        "syncs": [(row.began, row.at, row.version, row.num_bytes, row.receivers) for row in record.syncs],
        "trajectories": _trajectories(record.trajectories, record.tokens, packer),
    }


def _metrics(lines: Sequence[dict[str, float]], packer: Packer) -> dict[str, object]:
    names = sorted({name for line in lines for name in line} - {"step"})
    columns = {name: packer.add("f4", [line.get(name, math.nan) for line in lines]) for name in names}
    return {"step": packer.add("i4", [int(line["step"]) for line in lines]), "columns": columns}


def _spans(record: Record, packer: Packer) -> dict[str, object]:
    workers, stages = (sorted({getattr(row, name) for row in record.spans}) for name in ("worker", "stage"))
    return {
        "workers": workers,
        "stages": stages,
        "worker": packer.add("i2", [workers.index(row.worker) for row in record.spans]),
        "stage": packer.add("i2", [stages.index(row.stage) for row in record.spans]),
        "began": packer.add("f8", [row.began for row in record.spans]),
        "ended": packer.add("f8", [row.at for row in record.spans]),
    }


def _trajectories(rows: Sequence[TrajectoryRow], texts: dict[int, str], packer: Packer) -> dict[str, object]:
    prompts = {text: i for i, text in enumerate(dict.fromkeys(row.prompt for row in rows))}
    ids = {token: i for i, token in enumerate(sorted({token for row in rows for token in row.response_ids}))}
    return {
        "count": len(rows),
        "step": packer.add("i4", [row.step for row in rows]),
        "key": [row.key for row in rows],
        "why": [row.why for row in rows],
        "prompts": list(prompts),
        "prompt": packer.add("i4", [prompts[row.prompt] for row in rows]),
        "prompt_tokens": packer.add("i4", [len(row.prompt_ids) for row in rows]),
        "response": [row.response for row in rows],
        "source": [row.data_source for row in rows],
        "truth": [row.ground_truth for row in rows],
        "finish": [row.finish for row in rows],
        "turns": packer.add("i4", [row.turns for row in rows]),
        "tool_calls": packer.add("i4", [row.tool_calls for row in rows]),
        "reward": [row.reward for row in rows],
        "texts": [row.texts for row in rows],
        "failure": [row.failure for row in rows],
        "versions": [row.versions for row in rows],
        "vocabulary": [texts.get(token, f"<{token}>") for token in ids],
        "length": packer.add("i4", [len(row.response_ids) for row in rows]),
        "tokens": packer.add("i4", [ids[token] for row in rows for token in row.response_ids]),
        "ids": packer.add("i4", list(ids)),
        "mask": packer.add("u1", [value for row in rows for value in row.response_mask]),
        "columns": {name: _token_column(rows, name, packer) for name in _TOKEN_COLUMNS},
    }


def _token_column(rows: Sequence[TrajectoryRow], name: str, packer: Packer) -> ColumnPlace | None:
    """A column of all tokens, with the smallest integer where a row lacks it, or a number is not
    finite; None: all rows lack it."""
    absent, largest = -(1 << 15), (1 << 15) - 1
    values: list[int] = []
    found = False
    for row in rows:
        column: list[float | None] = getattr(row, name)
        found = found or bool(column)
        scaled = [absent if value is None else max(-largest, min(largest, round(value * _SCALE))) for value in column]
        values.extend(scaled or [absent] * len(row.response_ids))
    return packer.add("i2", values) if found else None
