"""Weight mapping by Megatron-Bridge (extra `bridge`), through its documented AutoBridge."""

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

from rl_megatron_peft.backend.cpu_shims import runnable
from rl_megatron_peft.backend.parallel import Ranks
from rl_megatron_peft.base_model.layout import Layout
from rl_megatron_peft.base_model.model_shape import ModelShape
from rl_protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeCapabilities:
    """What a version of Megatron-Bridge can do.

    Attributes:
        uses: functions of AutoBridge that this module calls.
        lacks: functions that later versions add; `rl_megatron_peft.peft.adapter_folder` does what
            they do.
        pads_vocabulary: it supports a vocabulary that tensor parallelism does not divide.
        without_transformer_engine: it can be imported without Transformer Engine.
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
"""Capabilities by major and minor version; other versions are not used."""


def bridge_problem(shape: ModelShape, layout: Layout) -> str:
    """Return why Megatron-Bridge can't map this model here, or an empty string if it can.

    If Megatron-Bridge is installed, this imports it, which takes seconds.
    """
    if shape.experts:
        return "this package maps experts by itself"
    if find_spec("megatron.bridge") is None:
        return "Megatron-Bridge is not installed; install 'rl-megatron-peft[bridge]'"
    version = metadata.version("megatron-bridge")
    known = CAPABILITIES.get((int(version.split(".")[0]), int(version.split(".")[1])))
    if known is None:
        return f"Megatron-Bridge {version} is installed, supported are {', '.join(f'{a}.{b}' for a, b in CAPABILITIES)}"
    if not known.without_transformer_engine and find_spec("transformer_engine") is None and not _imports():
        return f"Megatron-Bridge {version} can't be imported without Transformer Engine, which is not installed"
    if shape.vocab % layout.tensor and not known.pads_vocabulary:
        return f"Megatron-Bridge {version} can't divide a vocabulary of {shape.vocab} over tensor={layout.tensor} ranks; choose a divisor"
    return ""


def _imports() -> bool:
    """Return whether Megatron-Bridge can be imported; no release can without Transformer Engine."""
    try:
        _auto_bridge()
    except ImportError:
        return False
    return True


def _auto_bridge() -> Any:
    with runnable():
        from megatron.bridge import AutoBridge  # pyright: ignore[reportMissingImports]  # of the extra `bridge`

    return AutoBridge


class BridgeMapping:
    """WeightMapping by Megatron-Bridge.

    The first tensor-parallel rank of each stage reads a tensor and scatters it.

    Args:
        folder: Hugging Face checkpoint.
        shape: shape of its model.
        ranks: place of this process.

    Raises:
        ConfigError: `bridge_problem` found a problem.
    """

    def __init__(self, folder: Path, shape: ModelShape, ranks: Ranks) -> None:
        if problem := bridge_problem(shape, ranks.layout):
            raise ConfigError(f"{problem}; or use rl_megatron_peft.backend.model.weight_mapping.OwnMapping.")
        self._bridge = _auto_bridge().from_hf_pretrained(folder)
        self._shape = shape

    def load(self, model: GPTModel) -> None:
        self._declare_tied(model)
        with runnable():
            self._bridge.load_hf_weights([model])

    def weights(
        self, model: GPTModel, exported_value: Callable[[str, torch.nn.Parameter], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self._declare_tied(model)
        with runnable():
            tasks = [self._with_value(task, exported_value) for task in self._bridge.get_conversion_tasks([model])]
            exported = self._bridge.export_hf_weights(
                [model], show_progress=False, conversion_tasks=tasks, merge_adapter_weights=False
            )
        while True:
            with runnable():  # left before the yield, which runs the caller's code
                found = next(exported, None)
            if found is None:
                return
            yield found.param_name, found.weight

    def _with_value(self, task: Any, exported_value: Callable[[str, torch.nn.Parameter], torch.Tensor]) -> Any:
        """Return the task with the value to export, if this stage holds the parameter."""
        if task.param_weight is None:
            return task
        return dataclasses.replace(task, param_weight=exported_value(task.global_param_name, task.param_weight))

    def _declare_tied(self, model: GPTModel) -> None:
        """Tell Bridge, which reads it from the configuration, whether the output layer is tied.

        GPTModel takes this as an argument instead. With several stages the last one holds a copy
        of the embedding, which Bridge then fills.
        """
        model.config.share_embeddings_and_output_weights = self._shape.tied  # pyright: ignore[reportAttributeAccessIssue]
