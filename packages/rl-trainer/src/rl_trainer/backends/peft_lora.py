"""LoRA with peft: attaching adapters, and merging them into full weights."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file

from rl_protocol import ConfigError
from rl_protocol.support.peft_config import VALUE_HEAD
from rl_trainer.backends.experts.adapters import adapted_experts, expert_delta, factor_shapes, plain_name
from rl_trainer.config.adapter_folder import WEIGHTS_FILE, check_adapter
from rl_trainer.config.lora import EXPERT_PARAMETERS, LoraConfig

ADAPTER = "default"
PREFIX = "base_model.model."
_Items = Iterable[tuple[str, Sequence[torch.Tensor]]]
Gather = Callable[[_Items], _Items]


def attach(model: Any, config: LoraConfig, seed: int) -> Any:
    """Attach adapters, which alone are trainable: those of `config.adapter_path`, or fresh ones,
    which change no output.

    The initial weights of fresh ones depend on `seed` alone.

    Raises:
        ConfigError: the model lacks a target, or the adapter of the path does not fit.
    """
    settings = _settings(model, config, task_type="CAUSAL_LM")
    with _seeded(seed):
        adapted = peft.get_peft_model(model, settings)
    if config.adapter_path:
        _load(adapted, config)
    return adapted.eval()


def attach_to_critic(body: Any, prefix: str, head: torch.nn.Linear, config: LoraConfig, seed: int) -> None:
    """Replace the targets in the body of a value model by modules with adapters; see `attach`.

    Args:
        body: the model without its head.
        prefix: name of the body in its whole model, such as `model.`.
        head: its value head, which takes the weights of the folder's, if it has one.
        config: settings of the adapters.
        seed: of fresh ones.
    """
    with _seeded(seed):
        peft.inject_adapter_in_model(_settings(body, config), body, ADAPTER)
    if config.adapter_path:
        _load(body, config, f"{PREFIX}{prefix}", head)
    body.eval()


def share_base_of(body: Any, prefix: str, base: Mapping[str, torch.Tensor]) -> None:
    """Let the frozen weights of a body that `attach_to_critic` has changed be the memory of `base`.

    Args:
        body, prefix: as given to `attach_to_critic`.
        base: equal weights, by their checkpoint's names; they never change.
    """
    for name, weight in body.named_parameters():
        if not weight.requires_grad:
            weight.data = base[f"{prefix}{plain_name(name)}"]


def _load(adapted: Any, config: LoraConfig, prefix: str = "", head: torch.nn.Linear | None = None) -> None:
    """Replace the weights of the adapters, and of a value head, by those of a PEFT folder, as
    float32.

    `prefix` and a name in `adapted` are PEFT's name.
    """
    wrappers = (
        (f"{prefix}{name}".removeprefix(PREFIX), module)
        for name, module in adapted.named_modules()
        if hasattr(module, "base_layer")
    )
    shapes = dict(_adapted(name, module) for name, module in wrappers)
    state: dict[str, torch.Tensor] = {f"{prefix}{name}": tensor for name, tensor in adapted.state_dict().items()}
    if head is not None:
        shapes[VALUE_HEAD] = tuple(head.weight.shape)
        state |= {f"{PREFIX}{VALUE_HEAD}.{name}": tensor for name, tensor in head.state_dict().items()}
    check_adapter(config, shapes, value_head=head is not None)
    tensors = load_file(Path(config.adapter_path).expanduser() / WEIGHTS_FILE)
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name if name in state else f"{name.removesuffix('.weight')}.{ADAPTER}.weight"].copy_(tensor)


def _adapted(name: str, wrapper: Any) -> tuple[str, tuple[int, ...]]:
    """Name and shape of the linear module, or of the parameter of experts, that a module of peft
    adapts."""
    if isinstance(wrapper, ParamWrapper):
        return plain_name(f"{name}.{wrapper.parameter_name}"), tuple(wrapper.get_param().shape)
    return name, tuple(wrapper.base_layer.weight.shape)


def _settings(model: Any, config: LoraConfig, **more: Any) -> peft.LoraConfig:
    """The settings under peft's names, for a model that has all targets."""
    present = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    shapes = [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]
    experts = list(adapted_experts(shapes, config))
    inside = {part for name in experts for part in EXPERT_PARAMETERS[name.rpartition(".")[2]]}
    if both := sorted(inside & present):
        raise ConfigError(
            f"LoraConfig.target_modules names {', '.join(both)}, which this model has inside and outside of experts; peft can't adapt both. "
            "Leave them out."
        )
    missing = [name for name in config.targets() if name not in present | inside]
    if missing:
        raise ConfigError(
            f"LoraConfig.target_modules names {', '.join(missing)}, which this model does not have; it has {', '.join(sorted(present | inside))}."
        )
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]: declared int, computed as a number
        lora_dropout=config.dropout,
        # peft would double the rank of gate_proj and up_proj of experts
        target_modules=[name for name in config.targets() if name not in inside],
        target_parameters=experts or None,
        exclude_modules=list(config.exclude) or None,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        **more,
    )


@contextmanager
def _seeded(seed: int) -> Generator[None]:
    """Context in which torch draws from this seed alone on the CPU; afterwards it continues as
    before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed GPUs, which draw dropout
        yield


@contextmanager
def dropping(model: torch.nn.Module) -> Generator[None]:
    """Context that enables the adapters' dropout, and no other effect of training mode."""
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


@contextmanager
def without_adapter(model: Any) -> Generator[None]:
    """Context in which the model computes without its adapters, which stay trainable.

    peft makes them frozen for as long. FSDP2 takes the element type of a layer's gradients from its
    trainable weights at the first pass, which may be one in here; without any it would be that of
    the computation.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    with model.disable_adapter():
        for weight in trained:
            weight.requires_grad_(True)
        yield


def adapter_weights(state: Mapping[str, torch.Tensor], gather: Gather) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter's tensors under PEFT's names; for the arguments see `merged_weights`."""
    sharded = ((name, (tensor,)) for name, tensor in state.items() if ".lora_" in name)
    for name, (tensor,) in gather(sharded):
        yield name.replace(f".{ADAPTER}.", "."), tensor


def base_weights(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The frozen weights in the state of a model with adapters, under their checkpoint's names."""
    return {_plain(name): tensor for name, tensor in state.items() if ".lora_" not in name}


def _plain(name: str) -> str:
    return plain_name(name.removeprefix(PREFIX))


class MergedAdapter:
    """The base weights of the modules with adapters, and their values with an adapter merged in.

    Args:
        model: without adapters, in the element type to merge in; its weights are copied.
        config: settings that the adapters are trained with.
    """

    def __init__(self, model: torch.nn.Module, config: LoraConfig) -> None:
        self._config = config
        self._base = {
            name: module.weight.detach().clone()
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and config.covers(name)
        }
        parameters = {name: weight.detach() for name, weight in model.named_parameters() if weight.ndim == 3}
        self._factors = adapted_experts(((name, tuple(one.shape)) for name, one in parameters.items()), config)
        self._experts = {name: parameters[name].clone() for name in self._factors}

    @property
    def merged(self) -> frozenset[str]:
        """Names of the weights that an adapter changes."""
        return frozenset((*(f"{name}.weight" for name in self._base), *self._experts))

    def share(self, base: Mapping[str, torch.Tensor]) -> None:
        """Merge into these weights, which equal the copies and never change; drop the copies."""
        self._base = {name: base[f"{name}.weight"] for name in self._base}
        self._experts = {name: base[name] for name in self._experts}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of an adapter, by name."""
        found: dict[str, tuple[int, ...]] = {}
        for name, weight in self._base.items():
            out, inner = weight.shape
            found[f"{PREFIX}{name}.lora_A.weight"] = (self._config.rank, inner)
            found[f"{PREFIX}{name}.lora_B.weight"] = (out, self._config.rank)
            if self._config.use_dora:
                found[f"{PREFIX}{name}.lora_magnitude_vector.weight"] = (out,)
        for name, module in self._factors.items():
            a, b = factor_shapes(tuple(self._experts[name].shape), self._config.rank)
            found |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
        return found

    def weights(self, adapter: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that differ from the base; `adapter` holds the tensors named by `shapes`."""
        state = {f"{PREFIX}{name}.base_layer.weight": weight for name, weight in self._base.items()} | self._experts
        state |= {f"{name.removesuffix('.weight')}.{ADAPTER}.weight": tensor for name, tensor in adapter.items()}
        return merged_weights(state, self._config, lambda items: items)


def merged_weights(
    state: Mapping[str, torch.Tensor], config: LoraConfig, gather: Gather
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of the equivalent model without adapters, under its checkpoint's names.

    Nothing is changed in place.

    Args:
        state: state_dict of the model with adapters.
        config: settings of the adapters.
        gather: gathers sharded tensors; see `rl_trainer.backends.parallel_strategy.full_tensors`.
    """
    plain_shapes = ((_plain(name), tuple(tensor.shape)) for name, tensor in state.items() if ".lora_" not in name)
    experts = adapted_experts(plain_shapes, config)

    def sharded() -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
        """Name and weight of each, with what its adapter has: A, B, and with DoRA the magnitude."""
        for name, tensor in state.items():
            if ".lora_" not in name:
                plain = _plain(name)
                module = f"{PREFIX}{experts[plain]}" if plain in experts else name.removesuffix(".base_layer.weight")
                factors = (f"{module}.{part}.{ADAPTER}.weight" for part in ("lora_A", "lora_B"))
                magnitude = f"{module}.lora_magnitude_vector.{ADAPTER}.weight"
                yield plain, (tensor, *(state[one] for one in (*factors, magnitude) if one in state))

    for plain, (weight, *adapter) in gather(sharded()):
        if adapter:
            a, b, *magnitude = adapter
            delta = expert_delta(a, b, len(weight)) if plain in experts else b @ a
            weight = weight + config.scaling * delta
            if magnitude:
                weight = weight * (magnitude[0] / weight.norm(dim=1))[:, None]
        yield plain, weight
