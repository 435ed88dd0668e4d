"""A run folder whose texts try to become markup, code or layout."""

from __future__ import annotations

import json
import random
from pathlib import Path

from rl_trainer.record.record_file import RecordFile
from rl_trainer.record.record_rows import (
    AlarmRow,
    EndRow,
    PhaseRow,
    RuleRow,
    SpanRow,
    StartRow,
    StepRow,
    SyncRow,
    TokensRow,
    TrajectoryRow,
)

HOSTILE = [
    "</script><script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "<svg onload=window.pwned=1>",
    "\u202eright to left\u202c \u2066isolated\u2069 \u200bhidden\u0000null",
    "javascript:window.pwned=1",
    "{{constructor.constructor('window.pwned=1')()}}",
    "]]><!-- <style>*{display:none}</style>",
    "https://example.invalid/pixel.png",
]
LONG = "x" * 300_000


def write_run(
    folder: Path,
    *,
    steps: int = 6,
    count: int = 16,
    outcome: str = "finished",
    texts: tuple[str, ...] = (*HOSTILE, LONG),
) -> Path:
    """A run with metrics, alarms, spans and trajectories, all of them with hostile texts."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("trainer:\n  seed: 0\n  note: '" + HOSTILE[0] + "'\n", encoding="utf-8")
    chance = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps + 1):
            metrics = {"critic/score/mean": step / steps, "timing_s/gen": 0.5, "timing_s/step": 1.0, HOSTILE[1]: 1.0}
            metrics |= {f"training/rollout_probs_diff_quarter_{i}": i / 8 * step / steps for i in (1, 2, 3, 4) if step}
            if step % 2 == 0:
                metrics["val-core/sums/acc/mean@1"] = step / steps
            file.write(json.dumps({"step": step, **metrics}) + "\n")
    driver = RecordFile(folder / "record", "driver")
    driver.append([StartRow(at=1000.0, steps=steps), PhaseRow(at=1002.0, name="ray", began=1000.5)])
    driver.append([StepRow(at=1010.0 + step, step=step) for step in range(steps + 1)])
    driver.append([SyncRow(at=1010.0, began=1009.95, version=1, num_bytes=3 << 20, receivers=2)])
    driver.append([AlarmRow(at=1012.0, name="gap", text=f"step 2: {HOSTILE[0]}")])
    driver.append([AlarmRow(at=1013.0, name=HOSTILE[1], text=HOSTILE[3])])
    if outcome:
        driver.append([EndRow(at=1020.0, outcome=outcome, text=HOSTILE[2] if outcome == "failed" else "")])
    driver.close()
    worker = RecordFile(folder / "record", "reward")
    worker.append([RuleRow(at=1000.0, text="all"), TokensRow(at=1000.0, texts=dict(enumerate(texts)))])
    for step in range(1, steps + 1):
        at = 1009.0 + step
        worker.append([SpanRow(at=at + 0.5, worker="actor", stage="rollout", began=at)])
        worker.append([SpanRow(at=at + 0.9, worker="actor", stage="update_actor", began=at + 0.5)])
        worker.append([_trajectory(chance, step, i, texts, at) for i in range(count)])
    worker.close()
    return folder


def _trajectory(chance: random.Random, step: int, i: int, texts: tuple[str, ...], at: float) -> TrajectoryRow:
    ids = [chance.randrange(len(texts)) for _ in range(4)]
    return TrajectoryRow(
        at=at,
        step=step,
        key=f"s{step}-{i // 4}/{i % 4}/0",
        why=("worst", "best", "random", "gap")[i // 4 % 4],
        data_source=texts[1 % len(texts)],
        ground_truth=texts[i % len(texts)],
        prompt=texts[(i // 4) % len(texts)],
        response="".join(texts[j] for j in ids),
        prompt_ids=[1, 2],
        response_ids=ids,
        response_mask=[1, 1, 0, 1],
        rollout_log_probs=[-0.5, -1.0, 0.0, -2.0],
        old_log_probs=[-0.25, -1.0, -9.0, -2.5],
        advantages=[i / 8 - 1] * 4,
        versions=[(step - 1, 2), (step, 2)],
        reward={"score": float(i % 2), "acc": float(i % 2)},
        texts={"pred": texts[0]},
    )
