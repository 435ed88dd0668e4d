"""The schema of result files, and which numbers are better higher or lower."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.results import hardware_slug

Direction = Literal["higher", "lower"]
Row = dict[str, Any]


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One result file, as `results.write_result` writes it."""

    benchmark: str
    command: list[str]
    commit: str
    hardware: dict[str, str | int | None]
    versions: dict[str, str]
    load_average: list[float]
    rows: list[Row]
    utc: str = ""
    """When it was written, as in 2026-11-28T13:26:17Z; older files do not say."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Rows of one shape.

    Attributes:
        name: of the kind.
        identity: fields that every such row has and that tell it from the others of a file.
        better: measured fields, and which way is better. Fields that a row may lack are compared
            where both sides have them.
        needed: measured fields that every such row has, all above zero.
        shares: measured fields that every such row has, all from 0 to 1.
    """

    name: str
    identity: tuple[str, ...]
    better: Mapping[str, Direction] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()


POINT = ("family", "layout", "mib", "workers", "compute", "compute_s", "plane")
KINDS = (
    Kind(name="verdict", identity=("question",), needed=()),
    Kind(
        name="step",
        identity=POINT,
        better={"step_s": "lower", "all_cpu_s": "lower", "driver_mib": "lower"},
        needed=("step_s", "stage_p50_ms", "stage_p99_ms", "driver_mib", "driver_cpu_s", "plane_cpu_s", "all_cpu_s"),
    ),
    Kind(name="training", identity=("plane", "steps", "workers", "parameters_sha256")),
    Kind(
        name="backend",
        identity=("backend", "payload"),
        better={"put_gib_s": "higher", "get_gib_s": "higher", "put_p99_ms": "lower", "get_p99_ms": "lower"},
        needed=("put_gib_s", "get_gib_s", "put_p99_ms", "get_p99_ms", "cpu_s_per_gib"),
    ),
    Kind(name="validation", identity=("measured", "plane"), needed=("measured_s", "predicted_s")),
    Kind(name="prediction", identity=("published",), needed=("published_gain_percent", "nodes")),
    Kind(
        name="learning",
        identity=("algorithm", "overrides"),
        better={"final_accuracy": "higher", "seconds_per_step": "lower", "driver_bytes_per_step_max": "lower"},
        needed=("steps", "seconds_per_step", "driver_bytes_per_step_max"),
        shares=("final_accuracy",),
    ),
    Kind(
        name="operation",
        identity=("operation", "subject"),
        better={"median_ms": "lower"},
        needed=("median_ms", "rounds"),
    ),
    Kind(
        name="changes",
        identity=("learning_rate", "delta_syncs", "full_bytes"),
        better={"delta_bytes_median": "lower", "of_ideal_max": "lower"},
        needed=("delta_syncs", "full_bytes", "changed_share_median", "delta_bytes_median"),
    ),
    Kind(
        name="grpo step",
        identity=("cell", "side"),
        better={"step_s": "lower", "cpu_s_per_step": "lower", "peak_pss_mib": "lower", "command_s": "lower"},
        needed=("step_s", "cpu_s_per_step", "peak_pss_mib", "command_s", "tokens_per_response", "pairs"),
    ),
    Kind(
        name="placement",
        identity=("placement",),
        better={"first_step_s": "lower", "step_s": "lower", "cpu_s_per_step": "lower", "peak_pss_mib": "lower"},
        needed=("first_step_s", "step_s", "cpu_s_per_step", "peak_pss_mib", "pairs"),
    ),
    Kind(
        name="memory",
        identity=("memory_of", "model"),
        better={"measured_mib": "lower"},
        needed=("weights", "tokens", "measured_mib", "first_mib", "estimated_mib", "tokens_per_s"),
    ),
    Kind(
        name="asynchrony",
        identity=("async_cell", "engine"),
        better={"steps_per_hour": "higher", "step_s": "lower"},
        needed=("steps_per_hour", "step_s", "tokens", "runs"),
        shares=(
            *("rollout_starved", "rollout_refit", "rollout_validation"),
            *("trainer_starved", "trainer_refit", "trainer_validation"),
            *("reward_starved", "reward_refit", "reward_validation"),
        ),
    ),
    Kind(name="latencies", identity=("latency", "seed"), needed=("median_s", "sigma", "p99_over_p50")),
    Kind(name="speed-up", identity=("system", "speed_up"), needed=("speed_up",)),
    Kind(name="chaos", identity=("chaos_run", "ended")),
    Kind(name="parity", identity=("pair",), better={"largest_difference": "lower"}),
)
"""The first whose identity a row has is its kind."""


def kind_of(row: Row) -> Kind:
    """The kind of a row.

    Raises:
        ValueError: of none.
    """
    for kind in KINDS:
        if all(name in row for name in kind.identity):
            return kind
    raise ValueError(
        f"No kind of result has a row with the fields {', '.join(row)}; declare it in harness/result_schema.py."
    )


def directions(row: Row) -> Mapping[str, Direction]:
    """The measured numbers of a row, and which direction is better."""
    kind = kind_of(row)
    if kind.name == "verdict":
        return {"value": "higher" if row["aim"].startswith(">=") else "lower"}
    return kind.better


def identity(row: Row) -> tuple[str, ...]:
    """The fields that identify a row within its file."""
    return tuple(str(row[name]) for name in kind_of(row).identity)


def load(path: Path) -> Document:
    """Load and check a result file.

    Raises:
        ValueError: names what is wrong with it.
    """
    try:
        document = msgspec.json.decode(path.read_bytes(), type=Document)
        check(document)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    return document


def check(document: Document) -> None:
    """Raise ValueError unless the document says where it comes from and every row holds numbers."""
    if not re.fullmatch(r"[0-9a-f]{8,40}", document.commit):
        raise ValueError(f"the commit must be that of a clean working tree; got {document.commit!r}")
    if not document.command or not document.rows:
        raise ValueError("there must be a command and rows; an empty result is an error")
    missing = {"cpu", "cores", "memory_gib"} - document.hardware.keys()
    if missing or "python" not in document.versions:
        raise ValueError(f"hardware and versions must be complete; got {document.hardware}, {document.versions}")
    for row in document.rows:
        kind = kind_of(row)
        for name in kind.needed:
            if not isinstance(row.get(name), int | float) or row[name] <= 0:
                raise ValueError(f"{identity(row)}: {name} must be a number above zero; got {row.get(name)!r}")
        for name in kind.shares:
            if not isinstance(row.get(name), int | float) or not 0 <= row[name] <= 1:
                raise ValueError(f"{identity(row)}: {name} must be a number from 0 to 1; got {row.get(name)!r}")
        for name, value in numbers(row):
            if not math.isfinite(value):
                raise ValueError(f"{identity(row)}: {name} is {value}")
    names = [identity(row) for row in document.rows]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two rows are named {twice[0]}")


def check_place(path: Path, document: Document) -> None:
    """Raise ValueError unless the file lies at <hardware>/<date>_<commit>/<benchmark>.json."""
    date, _, commit = path.parent.name.partition("_")
    place = (path.parent.parent.name, commit, path.stem)
    want = (hardware_slug(document.hardware), document.commit, document.benchmark)
    if place != want or not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise ValueError(f"{path.name} lies under {place} of {date!r}; its content says {want}")


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number within a row, with the path to it."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from numbers(inner, f"{name}[{place}]")
