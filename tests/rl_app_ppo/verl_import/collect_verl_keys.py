"""Write the keys and defaults of verl's PPO configuration to a JSON file.

    pip download --no-deps verl==0.9.1
    python tests/rl_app_ppo/verl_import/collect_verl_keys.py verl-0.9.1-py3-none-any.whl

Reads verl's wheel and writes `rl_app_ppo/verl_import/defaults.json`. Only key names and default
values are taken; `_target_` entries, which name classes of verl, are left out.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

from rl_app_ppo.config.plain_yaml import parse_yaml

FILES = {
    "fsdp": "_generated_ppo_trainer",
    "megatron": "_generated_ppo_megatron_trainer",
    "torchtitan": "_generated_ppo_torchtitan_trainer",
    "veomni": "_generated_ppo_veomni_trainer",
}
"""Engine -> verl's generated file with the whole configuration for that engine."""
OUT = Path(__file__).parents[3] / "apps/ppo/src/rl_app_ppo/verl_import/defaults.json"


def collect(wheel: Path) -> dict[str, object]:
    """Return {version, common: key -> default, engines: engine -> key -> default}.

    `common` holds the keys whose default is the same with every engine.
    """
    found: dict[str, dict[str, object]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for engine, name in FILES.items():
            nested = parse_yaml(archive.read(f"verl/trainer/config/{name}.yaml").decode())
            found[engine] = {
                key: value for key, value in leaves(nested).items() if key.rpartition(".")[2] != "_target_"
            }
    shared = set.intersection(*(set(keys) for keys in found.values()))
    common = {k: v for k, v in found["fsdp"].items() if k in shared and all(f[k] == v for f in found.values())}
    return {
        "version": wheel.name.split("-")[1],
        "common": common,
        "engines": {engine: {k: v for k, v in values.items() if k not in common} for engine, values in found.items()},
    }


def leaves(nested: dict[str, object]) -> dict[str, object]:
    """Return dotted key -> value; empty groups are kept as values."""
    flat: dict[str, object] = {}
    for name, value in nested.items():
        if isinstance(value, dict) and value:
            flat |= {f"{name}.{inner}": v for inner, v in leaves(value).items()}
        else:
            flat[name] = value
    return flat


if __name__ == "__main__":
    OUT.write_text(json.dumps(collect(Path(sys.argv[1])), indent=0) + "\n")
