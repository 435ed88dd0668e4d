"""Folders of runs with kept batches, without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rl_app_ppo.config.loading import load_config, to_yaml
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_protocol import BatchData, ObjectColumn, dense, ragged
from rl_trainer.checkpoints.checkpoint_folder import facts
from rl_trainer.checkpoints.held_batches import SavedRows
from rl_trainer.checkpoints.kept_batches import PROMPTS, ROWS, KeptBatch, publish, unpublished, write_columns


def keep_run(folder: Path, scores: Mapping[int, Sequence[float]], *overrides: str, steps: int = 2) -> RunFiles:
    """Write the folder of a run that has kept the batch of each step of `scores`.

    A batch has one prompt with a response of two tokens for each score. Its loss is the first
    score, and the digest of the weights after it names all scores so far.
    """
    files, config = RunFiles(folder=folder), to_yaml(load_config(list(overrides)))
    folder.mkdir(exist_ok=True)
    files.config.write_text(config)
    done = sorted(scores) or list(range(1, steps + 1))
    lines = [{"step": step, "actor/pg_loss": scores[step][0] if scores else 0.0} for step in done]
    files.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in sorted(scores):
        publish(files.batches, _batch(files.batches, step, scores), config, -1)
    return files


def _batch(batches: Path, step: int, scores: Mapping[int, Sequence[float]]) -> KeptBatch:
    mine, folder, uid = scores[step], unpublished(batches, step), f"s{step}-0"
    folder.mkdir(parents=True)
    keys = tuple(f"{uid}/{session}/0" for session in range(len(mine)))
    rows = BatchData(
        {
            "responses": ragged([[5, 6] for _ in mine], "int64"),
            "scores": dense(np.array(mine, np.float32)),
            "advantages": ragged([[score, score] for score in mine], "float32"),
        }
    )
    prompts = BatchData({"prompts": ragged([[7, 8]], "int64"), "ground_truth": ObjectColumn.from_values(["15"])})
    for name, data in ((ROWS, rows), (PROMPTS, prompts)):
        write_columns(folder / name, data)
    return KeptBatch(
        step=step,
        version=step - 1,
        critic_updates=0,
        rows=SavedRows(partition="train", keys=keys, tags=tuple({"response_len": 2} for _ in keys), file=ROWS),
        prompts=SavedRows(partition="train/prompts", keys=(uid,), file=PROMPTS),
        metrics={"actor/pg_loss": mine[0]},
        weights={"actor/0": str([scores[one] for one in sorted(scores) if one <= step])},
        files={name: facts(folder / name) for name in (ROWS, PROMPTS)},
    )
