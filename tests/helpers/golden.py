"""The golden configurations of the app, in `tests/rl_app_ppo/golden`.

    uv run --group dev just golden

writes the files. Tests compare them with the code; add a line to the changelog for a changed one.
"""

from __future__ import annotations

import sys

from packages import ROOT

from rl_app_ppo.config.loading import load_config, to_yaml

FOLDER = ROOT / "tests" / "rl_app_ppo" / "golden"
DATA = ("data.train_files=train.jsonl", "data.val_files=val.jsonl", "model.path=/models/m")
CONFIGURATIONS = {
    "data-grpo": ("algorithm=grpo", *DATA),
    "data-ppo": ("algorithm=ppo", *DATA),
    "torch": ("model_engine=torch",),
    "fsdp": ("model_engine=fsdp",),
    "megatron": ("model_engine=megatron", "lora.rank=8"),
}
"""Name of the file -> overrides."""

if __name__ == "__main__":
    for name, overrides in CONFIGURATIONS.items():
        (FOLDER / f"{name}.yaml").write_text(to_yaml(load_config(overrides)), encoding="utf-8")
    sys.stdout.write(f"wrote {len(CONFIGURATIONS)} files to {FOLDER.relative_to(ROOT)}\n")
