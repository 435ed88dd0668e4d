"""The kind of session of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.demo.demos import DEMOS
from rl_protocol import ConfigError
from rl_trainer.data import PromptDataset
from rl_trainer.data.prompt_rows import TOOL_AGENT
from rl_trainer.rollout.session_kinds import session_kind
from rl_trainer.rollout.session_turns import SessionKind


def session_of(config: AppConfig, model_path: Path | None) -> SessionKind:
    """The kind of session of a run.

    Args:
        config: the configuration of the run.
        model_path: folder of the model; None: the demo model, which need not exist yet.

    Raises:
        ConfigError: there is no such kind, or its tools or dialect can't be used with the model.
    """
    if config.rollout.session != TOOL_AGENT:
        return session_kind(config.rollout, template="")
    if model_path is None:
        template = DEMOS[config.data.demo].template
        if not template:
            raise ConfigError(
                f"rollout.session={TOOL_AGENT} needs a model whose chat template describes tools, and that of "
                f"data.demo={config.data.demo} has none. Set preset=demo-calculator, or model.path to a model of yours."
            )
        return session_kind(config.rollout, template)
    from rl_trainer.data.chat_template import read_template  # jinja2, which other sessions do not need

    return session_kind(config.rollout, read_template(model_path, with_tools=True))


def check_rows(kind: SessionKind, data: Mapping[str, PromptDataset]) -> None:
    """Check that sessions of this kind can run every row.

    Raises:
        ConfigError: one can't; names it.
    """
    if kind.check is None:
        return
    for split, rows in data.items():
        for number in range(len(rows)):
            try:
                kind.check(rows[number])
            except ConfigError as error:
                raise ConfigError(f"Row {number + 1} of the {split} data: {error}") from error
