"""The golden files of the app: configurations in `tests/rl_app_ppo/golden`, and its OPTIONS.md.

    uv run --group dev just golden

writes the files. Tests compare them with the code; add a line to the changelog for a changed one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from packages import ROOT

from rl_app_ppo.cli.explain import shown
from rl_app_ppo.cli.option_names import help_of
from rl_app_ppo.config.loading import load_config, options, to_yaml
from rl_app_ppo.config.presets import NO_PRESET, of_demo, presets
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.config.training_backends import TRAINING_BACKENDS
from rl_protocol.support.option_tree import list_groups

FOLDER = ROOT / "tests" / "rl_app_ppo" / "golden"
TABLE = ROOT / "apps" / "ppo" / "OPTIONS.md"
DATA = ("data.train_files=train.jsonl", "data.val_files=val.jsonl", "model.path=/models/m")
NEEDS = {"megatron": ["lora.rank=8"]}
"""Training backend -> further overrides of its configuration."""
CONFIGURATIONS = {
    "data-grpo": ("algorithm=grpo", *DATA),
    "data-ppo": ("algorithm=ppo", *DATA),
    **{name: (f"model_engine={name}", *NEEDS.get(name, [])) for name in TRAINING_BACKENDS},
    **{name: (f"preset={name}",) for name in presets() if name != NO_PRESET and not of_demo(name)},
}
"""Name of the file -> overrides."""
HEAD = """\
# Options of rl-app-ppo

Written by `just golden` from the declarations of the options. `uv run apps/ppo --explain KEY`
prints the value of an option in a configuration and where it comes from.

A run that is resumed may change the options marked *resume*. The last column has the keys of verl
whose values mean the same; `--from-verl` converts others.
"""


def options_table() -> str:
    """OPTIONS.md."""
    return HEAD + "".join(line + "\n" for path, help in list_groups(AppConfig).items() for line in _section(path, help))


def _section(path: str, help: str) -> Iterator[str]:
    rows = [option for option in options() if option.key.rpartition(".")[0] == path]
    if not rows:
        return
    yield from ("", f"## `{path}`: {help}" if path else "## Without a group", "")
    yield from ("| key | type | default | bounds | meaning | resume | verl |", "|---|---|---|---|---|---|---|")
    for option in rows:
        meaning = help_of(option).replace("|", "\\|").replace("*", "\\*")
        cells = (
            f"`{option.key}`",
            option.type,
            f"`{shown(option.default)}`",
            option.spec.bounds,
            meaning,
            "" if option.resume == "fixed" else "resume",
            ", ".join(f"`{key}`" for key in option.verl),
        )
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for name, overrides in CONFIGURATIONS.items():
        (FOLDER / f"{name}.yaml").write_text(to_yaml(load_config(overrides)), encoding="utf-8")
    TABLE.write_text(options_table(), encoding="utf-8")
    sys.stdout.write(
        f"wrote {len(CONFIGURATIONS)} files to {FOLDER.relative_to(ROOT)}, and {TABLE.relative_to(ROOT)}\n"
    )
