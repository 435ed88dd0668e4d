"""LoRA through peft: attaching adapters, and the weights that a model with them amounts to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import peft
import torch

from rl_protocol import ConfigError
from rl_trainer.lora import LoraConfig

ADAPTER = "default"
PREFIX = "base_model.model."


def attach(model: Any, config: LoraConfig, seed: int) -> Any:
    """The model with adapters, which alone want gradients; a fresh adapter changes nothing. Its first weights depend on `seed` alone.

    Raises:
        ConfigError: a target that the model does not have.
    """
    present = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    missing = [name for name in config.targets() if name not in present]
    if missing:
        raise ConfigError(
            f"lora.target_modules names {', '.join(missing)}, which this model does not have; it has {', '.join(sorted(present))}."
        )
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]: declared int, computed as a number
        lora_dropout=config.dropout,
        target_modules=list(config.targets()),
        exclude_modules=list(config.excluded()) or None,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(model, settings)
    return adapted.eval()


@contextmanager
def dropping(model: torch.nn.Module) -> Generator[None]:
    """Within it the adapters' dropout is on, and nothing else of what training mode changes."""
    dropouts = [
        module
        for name, module in model.named_modules()
        if ".lora_dropout." in name and isinstance(module, torch.nn.Dropout)
    ]
    for module in dropouts:
        module.train()
    try:
        yield
    finally:
        for module in dropouts:
            module.eval()


def adapter_weights(
    state: Mapping[str, torch.Tensor], whole: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the adapter alone, under the names that PEFT writes them with; see `merged_weights` for the arguments."""
    for name, tensor in state.items():
        if ".lora_" in name:
            yield name.replace(f".{ADAPTER}.", "."), whole(tensor)


class MergedAdapter:
    """The base weights of a model that adapters are for, beside it, and what they become with an adapter.

    Args:
        model: without adapters, in the element type that merging computes in; its weights are copied.
        config: what the adapters are trained with.
    """

    def __init__(self, model: torch.nn.Module, config: LoraConfig) -> None:
        self._config = config
        self._base = {
            name: module.weight.detach().clone()
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and config.covers(name)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of an adapter."""
        found: dict[str, tuple[int, ...]] = {}
        for name, weight in self._base.items():
            out, inner = weight.shape
            found[f"{PREFIX}{name}.lora_A.weight"] = (self._config.rank, inner)
            found[f"{PREFIX}{name}.lora_B.weight"] = (out, self._config.rank)
            if self._config.use_dora:
                found[f"{PREFIX}{name}.lora_magnitude_vector.weight"] = (out,)
        return found

    def weights(self, adapter: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that differ from the base's, under the names of its checkpoint; `adapter` holds what `shapes` names."""
        state = {f"{PREFIX}{name}.base_layer.weight": weight for name, weight in self._base.items()}
        state |= {f"{name.removesuffix('.weight')}.{ADAPTER}.weight": tensor for name, tensor in adapter.items()}
        return merged_weights(state, self._config, lambda tensor: tensor)


def merged_weights(
    state: Mapping[str, torch.Tensor], config: LoraConfig, whole: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the equivalent model without adapters, under the names of its checkpoint; nothing is changed in place.

    Args:
        state: state_dict of the model with adapters.
        config: what they were attached with.
        whole: puts a sharded tensor together.
    """
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        plain, weight = name.removeprefix(PREFIX).replace(".base_layer.", "."), whole(tensor)
        module, is_weight = name.removesuffix(".base_layer.weight"), name.endswith(".base_layer.weight")
        if is_weight:
            a, b = (whole(state[f"{module}.lora_{side}.{ADAPTER}.weight"]) for side in "AB")
            weight = weight + config.scaling * (b @ a)
            magnitude = state.get(f"{module}.lora_magnitude_vector.{ADAPTER}.weight")
            if magnitude is not None:
                weight = weight * (whole(magnitude) / weight.norm(dim=1))[:, None]
        yield plain, weight
