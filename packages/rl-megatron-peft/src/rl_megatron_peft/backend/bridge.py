"""The mapping of Megatron-Bridge (extra `bridge`), through what it documents: AutoBridge and its conversion tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from rl_megatron_peft.backend.compat import runnable
from rl_megatron_peft.backend.parallel import Ranks
from rl_megatron_peft.family import ModelShape
from rl_megatron_peft.layout import Layout
from rl_protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeCapabilities:
    """What a version of Megatron-Bridge can do for us.

    Attributes:
        uses: functions of AutoBridge that are called here.
        lacks: functions of later versions that it does not have; what they do is done by `rl_megatron_peft.adapter`.
        pads_vocabulary: it shares out a vocabulary that the tensor-parallel ranks do not divide.
        without_transformer_engine: it can be imported where that is not installed.
    """

    uses: frozenset[str]
    lacks: frozenset[str]
    pads_vocabulary: bool
    without_transformer_engine: bool


CAPABILITIES: Mapping[tuple[int, int], BridgeCapabilities] = {
    (0, 3): BridgeCapabilities(
        uses=frozenset({"from_hf_pretrained", "load_hf_weights", "get_conversion_tasks", "export_hf_weights"}),
        lacks=frozenset({"save_hf_adapter", "export_adapter_ckpt"}),
        pads_vocabulary=False,
        without_transformer_engine=False,
    )
}
"""By major and minor version; others are not used."""


def bridge_problem(shape: ModelShape, layout: Layout) -> str:
    """Why Megatron-Bridge can't map this model here; empty: it can. Imports it where it is installed, which takes seconds."""
    if find_spec("megatron.bridge") is None:
        return "Megatron-Bridge is not installed; install 'rl-megatron-peft[bridge]'"
    version = metadata.version("megatron-bridge")
    known = CAPABILITIES.get((int(version.split(".")[0]), int(version.split(".")[1])))
    if known is None:
        return f"Megatron-Bridge {version} is installed, known are {', '.join(f'{a}.{b}' for a, b in CAPABILITIES)}"
    if not known.without_transformer_engine and find_spec("transformer_engine") is None and not _imports():
        return f"Megatron-Bridge {version} can't be imported without Transformer Engine, which is not installed"
    if shape.vocab % layout.tensor and not known.pads_vocabulary:
        return f"Megatron-Bridge {version} can't share a vocabulary of {shape.vocab} among tensor={layout.tensor} ranks; choose a divisor"
    return ""


def _imports() -> bool:
    """Whether it can be imported without Transformer Engine: its releases can't, those after them may."""
    try:
        _auto_bridge()
    except ImportError:
        return False
    return True


def _auto_bridge() -> Any:
    with runnable():
        from megatron.bridge import AutoBridge  # pyright: ignore[reportMissingImports]  # of an extra of its own

    return AutoBridge


class BridgeMapping:
    """WeightMapping by Megatron-Bridge. The first tensor-parallel rank of each stage reads a tensor and hands it out.

    Args:
        folder: Hugging Face checkpoint.
        shape: of the model in it.
        ranks: where this process stands.

    Raises:
        ConfigError: see `bridge_problem`.
    """

    def __init__(self, folder: Path, shape: ModelShape, ranks: Ranks) -> None:
        if problem := bridge_problem(shape, ranks.layout):
            raise ConfigError(f"{problem}; or leave the mapping to rl_megatron_peft.backend.mapping.OwnMapping.")
        self._bridge = _auto_bridge().from_hf_pretrained(folder)
        self._shape = shape

    def load(self, model: GPTModel) -> None:
        """See WeightMapping."""
        self._declare_tied(model)
        with runnable():
            self._bridge.load_hf_weights([model])

    def weights(
        self, model: GPTModel, read: Callable[[str, torch.nn.Parameter], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """See WeightMapping."""
        self._declare_tied(model)
        with runnable():
            tasks = [self._reading(task, read) for task in self._bridge.get_conversion_tasks([model])]
            exported = self._bridge.export_hf_weights(
                [model], show_progress=False, conversion_tasks=tasks, merge_adapter_weights=False
            )
        while True:
            with runnable():  # not across the yield: what the caller does in between is its own business
                found = next(exported, None)
            if found is None:
                return
            yield found.param_name, found.weight

    def _reading(self, task: Any, read: Callable[[str, torch.nn.Parameter], torch.Tensor]) -> Any:
        """The task of a parameter of this stage, with what is to be exported in its place."""
        if task.param_weight is None:
            return task
        return dataclasses.replace(task, param_weight=read(task.global_param_name, task.param_weight))

    def _declare_tied(self, model: GPTModel) -> None:
        """Bridge looks in the model's configuration, where its own providers have it, for what GPTModel is told as an argument. With several
        stages the last has a copy of the embedding, which Bridge then fills."""
        model.config.share_embeddings_and_output_weights = self._shape.tied  # pyright: ignore[reportAttributeAccessIssue]
