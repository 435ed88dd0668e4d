"""LoRA beside Megatron-Core's parallel linear layers. The layers keep their names and weights: an adapter adds to what they put out.

Every logical module has a B of its own, with its rows in the order of the Hugging Face weights. Canonical adapters have an A per logical
module as well; fused ones share the A of those that Megatron fuses. So an adapter is exported by gathering, without any reordering.

Tensor parallelism cuts B of linear_qkv and linear_fc1 in its rows, and A of linear_proj and linear_fc2 in its columns; the other factor
is the same on every rank and gets the same gradient there, or with sequence parallelism that of the rank's tokens. Both are float32
whatever the model computes in, as optimizers want them.

With DoRA a module has the length of each of its rows as well, `magnitude`, which is cut as the rows of its B are; a row of linear_proj or
linear_fc2 is as long as its parts on all ranks together.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from rl_megatron_peft.backend.model import ADAPTER, fused_order, unfuse
from rl_megatron_peft.backend.parallel import Ranks, sum_over_layer
from rl_megatron_peft.config import LoraConfig
from rl_megatron_peft.family import ModelShape
from rl_megatron_peft.layout import ROW_PARALLEL
from rl_megatron_peft.naming import FUSED, MegatronModule
from rl_protocol.errors import ConfigError


@dataclass(slots=True)
class Draw:
    """Which dropout masks the adapters of a stage draw. Not a state that goes on: a mask depends on (seed, pass, layer) alone, so that it is the
    same under any layout of tensors and stages, and after a resume.

    Attributes:
        pass_name: of the training pass under way; empty: nothing is dropped.
    """

    pass_name: str = ""


@dataclass(frozen=True, slots=True)
class LoraFactor:
    """One factor on this rank.

    Attributes:
        key: name in the whole model: `<Hugging Face or fused module>.lora_A`, `.lora_B` or `.lora_magnitude_vector`.
        parameter: this rank's part.
        split: dimension that tensor parallelism cuts; None: every rank has the whole.
        partial: every tensor-parallel rank has a share of its gradient.
    """

    key: str
    parameter: torch.nn.Parameter
    split: int | None
    partial: bool


class Lora(torch.nn.Module):
    """The adapter of one fused linear layer: scaling * B A x for each of its logical modules that is a target, or with DoRA
    magnitude * (W + scaling * B A) x / lengths, where the lengths of the rows of W + scaling * B A pass no gradient on. As in PEFT, dropout
    is of all inputs but those of the layer as it was: W x + (magnitude / lengths - 1) * W d(x) + magnitude / lengths * scaling * B A d(x).

    Args:
        module: which layer it is.
        config: rank, scale and targets.
        shape, ranks: of the model.
        fused: the logical modules share one A.
        base: the layer's weight.
        seed: A depends on (seed, name) alone, whatever the layout; B is zero, and magnitudes are the lengths of the base's rows.
        draw: what is dropped. Modules that Megatron fuses have their input dropped once for all, also where each has an A of its own.
    """

    def __init__(
        self,
        module: MegatronModule,
        config: LoraConfig,
        shape: ModelShape,
        ranks: Ranks,
        *,
        fused: bool,
        base: torch.Tensor,
        seed: int,
        draw: Draw,
    ) -> None:
        super().__init__()
        self.module = module
        self.enabled = True
        self._dropout = config.dropout
        self._seed = seed
        self._draw = draw
        self._scaling = {part.logical: config.scaling_of(part.name) for part in module.parts}
        self._row_parallel = module.fused in ROW_PARALLEL
        self._sequence_parallel = ranks.layout.sequence_parallel
        cut = self._row_parallel or self._sequence_parallel  # the input: in its features, or in its tokens
        self._shard = (ranks.tensor, ranks.layout.tensor) if cut else (0, 1)
        self._names = {part.logical: part.name for part in module.parts}
        self._fused = fused and len(self._names) > 1
        targets = [part.logical for part in module.parts if config.covers(part.name)]
        rank_of = {part.logical: config.rank_of(part.name) for part in module.parts}
        out_cut = 1 if self._row_parallel else ranks.layout.tensor
        self._rows = {name: shape.linear(name)[0] // out_cut for name in self._names}
        order = fused_order(shape, ranks.layout.tensor) if module.fused == "linear_qkv" else None
        self._order = None if order is None else torch.tensor(order, device=base.device)
        a = {}
        for key in [module.fused] if self._fused else targets:
            rank = rank_of[targets[0] if self._fused else key]
            whole = _first_a(f"{module.name}.{key}", rank, shape.linear(targets[0])[1], seed)
            shards = whole.chunk(ranks.layout.tensor, dim=1) if self._row_parallel else [whole] * ranks.layout.tensor
            a[key] = torch.nn.Parameter(shards[ranks.tensor].to(base.device, copy=True).contiguous())
        self.a = torch.nn.ParameterDict(a)
        self.b = torch.nn.ParameterDict(
            {key: torch.nn.Parameter(torch.zeros(self._rows[key], rank_of[key], device=base.device)) for key in targets}
        )
        self._apart = partial(unfuse, fused=module.fused, shape=shape, tensor=ranks.layout.tensor)
        lengths = self._lengths(base) if config.use_dora else {}
        self.magnitude = torch.nn.ParameterDict(
            {key: torch.nn.Parameter(lengths[key].clone()) for key in targets if config.use_dora}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out] of this rank, in Megatron's order of rows, for [..., in] of this rank; tokens are the first dimension."""
        return self._put_out(self._dropped(x))

    def _put_out(self, x: torch.Tensor) -> torch.Tensor:
        """See forward; of an input as it was dropped."""
        low = torch.nn.functional.linear(x, torch.cat(list(self.a.values())).to(x.dtype))
        if self._row_parallel:
            ((name, b),) = self.b.items()
            return self._scaling[name] * torch.nn.functional.linear(self._summed(low), b.to(x.dtype))
        low = self._of_all(low)
        low_of = dict(zip(self.a, low.split([a.shape[0] for a in self.a.values()], dim=-1), strict=True))
        parts = [
            self._scaling[name] * torch.nn.functional.linear(low_of[self._a_key(name)], self.b[name].to(x.dtype))
            if name in self.b
            else x.new_zeros(*low.shape[:-1], rows)
            for name, rows in self._rows.items()
        ]
        return self._ordered(torch.cat(parts, dim=-1), -1)

    def added(
        self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """What a layer of this weight and bias, which puts out `out` for `x`, puts out with the adapter."""
        dropped = self._dropped(x)
        more = self._put_out(dropped)
        if not self.magnitude:
            return out + more
        scale = self._scale(weight)
        linear = (out if bias is None else out - bias) if dropped is x else self._linear(dropped, weight)
        return out + (scale - 1).to(out.dtype) * linear + scale.to(out.dtype) * more

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's part of the layer's weight with the adapter in it; with DoRA a collective over the ranks that share the layer."""
        if not self.magnitude:
            return weight + self.weight().to(weight.dtype)
        return (self._scale(weight)[:, None] * (weight.float() + self.weight())).to(weight.dtype)

    def weight(self) -> torch.Tensor:
        """What the adapter adds to this rank's part of the layer's weight."""
        columns = next(iter(self.a.values()))
        parts = [
            self._scaling[name] * (self.b[name] @ self.a[self._a_key(name)])
            if name in self.b
            else columns.new_zeros(rows, columns.shape[1])
            for name, rows in self._rows.items()
        ]
        return self._ordered(torch.cat(parts), 0)

    def factors(self) -> Iterator[LoraFactor]:
        """Its parameters in a fixed order; a shared A comes once, under the name of the fused module."""
        yield from map(self._a, self.a)
        yield from map(self._b, self.b)
        yield from map(self._magnitude, self.magnitude)

    def parts(self, logical: str) -> dict[str, LoraFactor]:
        """`a`, `b` and with DoRA `magnitude` of a logical module on this rank."""
        found = {"a": self._a(self._a_key(logical)), "b": self._b(logical)}
        return found | ({"magnitude": self._magnitude(logical)} if self.magnitude else {})

    def _a(self, key: str) -> LoraFactor:
        name = self.module.name if self._fused else self._names[key]
        return self._factor(f"{name}.lora_A", self.a[key], 1 if self._row_parallel else None)

    def _b(self, logical: str) -> LoraFactor:
        return self._factor(f"{self._names[logical]}.lora_B", self.b[logical], None if self._row_parallel else 0)

    def _magnitude(self, logical: str) -> LoraFactor:
        key, split = f"{self._names[logical]}.lora_magnitude_vector", None if self._row_parallel else 0
        return self._factor(key, self.magnitude[logical], split)

    def _scale(self, weight: torch.Tensor) -> torch.Tensor:
        """float32 [out] of this rank, in Megatron's order of rows: what each row of the merged weight is multiplied by."""
        parts = [
            self.magnitude[name] / lengths if name in self.magnitude else torch.ones_like(lengths)
            for name, lengths in self._lengths(weight).items()
        ]
        return self._ordered(torch.cat(parts), 0)

    @torch.no_grad()
    def _lengths(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """float32 [rows] of each logical module on this rank: how long the rows of its weight with B A are, over all ranks."""
        squares = (weight.float() + self.weight()).square().sum(1)
        if self._row_parallel:
            sum_over_layer(squares)
        return dict(zip(self._names, self._apart(squares.sqrt()), strict=True))

    def _factor(self, key: str, parameter: torch.nn.Parameter, split: int | None) -> LoraFactor:
        return LoraFactor(key, parameter, split, partial=self._sequence_parallel and split is None)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """What a layer of that weight, without a bias, puts out for `x`."""
        if self._row_parallel:
            return self._summed(torch.nn.functional.linear(x, weight))
        return torch.nn.functional.linear(self._of_all(x), weight)

    def _of_all(self, low: torch.Tensor) -> torch.Tensor:
        """What every rank computes from: with sequence parallelism each has had its tokens alone."""
        across = (
            gather_from_sequence_parallel_region if self._sequence_parallel else copy_to_tensor_model_parallel_region
        )
        return across(low)

    def _summed(self, low: torch.Tensor) -> torch.Tensor:
        """Summed over the ranks: of all tokens, or with sequence parallelism of this rank's."""
        if self._sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low)
        return reduce_from_tensor_model_parallel_region(low)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself where nothing is dropped."""
        return x * self._mask(x) if self._dropout and self._draw.pass_name else x

    def _mask(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] of this rank: 0 with the probability of dropout, else what keeps the mean. It is drawn for all ranks at once."""
        dim = 0 if self._sequence_parallel and not self._row_parallel else -1
        rank, of = self._shard
        size = list(x.shape)
        size[dim] *= of
        generator = _generator(f"{self._seed}/{self._draw.pass_name}/{self.module.name}", x.device)
        kept = torch.rand(size, generator=generator, device=x.device).chunk(of, dim=dim)[rank] >= self._dropout
        return kept.to(x.dtype) / (1 - self._dropout)

    def _a_key(self, logical: str) -> str:
        return self.module.fused if self._fused else logical

    def _ordered(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        return rows if self._order is None else rows.index_select(dim, self._order)


def _first_a(name: str, rank: int, columns: int, seed: int) -> torch.Tensor:
    """As PEFT draws it: uniform within 1 / sqrt(columns)."""
    bound = 1 / math.sqrt(columns)
    return torch.empty(rank, columns).uniform_(-bound, bound, generator=_generator(f"{seed}/{name}"))


def _generator(name: str, device: torch.device | None = None) -> torch.Generator:
    return torch.Generator(device or "cpu").manual_seed(zlib.crc32(name.encode()))


def _add(
    lora: Lora, layer: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, later = output  # a bias that is added later is not in `out`: none of our families has one
    return (lora.added(out, inputs[0], layer.weight, layer.bias) if lora.enabled else out), later


def attach(
    model: GPTModel,
    config: LoraConfig,
    shape: ModelShape,
    ranks: Ranks,
    *,
    fused: bool = True,
    seed: int = 0,
    draw: Draw | None = None,
) -> list[Lora]:
    """Give this stage's target layers an adapter each, which alone want gradients; fresh adapters change nothing.

    Args:
        model: without adapters.
        config: what is adapted.
        shape, ranks: of the model.
        fused: one A for q, k and v, and one for gate and up, as Megatron's own LoRA has it; False: one each, as PEFT has it.
        seed: of their first weights and of dropout.
        draw: names the training pass under way; None: nothing is ever dropped.

    Returns:
        This stage's adapters, by layer.

    Raises:
        ConfigError: fused adapters on part of a fused module.
    """
    check_targets(config, shape, fused=fused)
    draw = Draw() if draw is None else draw
    found: list[Lora] = []
    layers: list[Any] = list(cast(Any, model.decoder).layers)
    for layer in layers:
        linears = {
            "linear_qkv": layer.self_attention.linear_qkv,
            "linear_proj": layer.self_attention.linear_proj,
            "linear_fc1": layer.mlp.linear_fc1,
            "linear_fc2": layer.mlp.linear_fc2,
        }
        for name, linear in linears.items():
            module = MegatronModule(layer.layer_number - 1, name)
            if any(config.covers(part.name) for part in module.parts):
                lora = Lora(module, config, shape, ranks, fused=fused, base=linear.weight, seed=seed, draw=draw)
                linear.add_module(ADAPTER, lora)
                linear.register_forward_hook(partial(_add, lora))
                found.append(lora)
    return found


def check_targets(config: LoraConfig, shape: ModelShape, *, fused: bool) -> None:
    """That adapters of this kind can be attached.

    Raises:
        ConfigError: names the setting.
    """
    every = [MegatronModule(layer, name).parts for layer in range(shape.layers) for name in FUSED]
    if not any(config.covers(part.name) for parts in every for part in parts):
        raise ConfigError(
            f"target_modules is {config.target_modules!r}, which is no module of this model of {shape.layers} layers.",
            field="target_modules",
        )
    for name in FUSED if fused else ():
        for layer in range(shape.layers):
            parts = MegatronModule(layer, name).parts
            covered = [part.logical for part in parts if config.covers(part.name)]
            ranks = {part.name: config.rank_of(part.name) for part in parts if config.covers(part.name)}
            if len(set(ranks.values())) > 1:
                raise ConfigError(
                    f"Fused adapters of {', '.join(FUSED[name])} share one A and have one rank; got {ranks}. Set fused=False.",
                    field="rank_pattern",
                )
            if covered and len(covered) < len(parts):
                missing = ", ".join(part.name for part in parts if part.logical not in covered)
                raise ConfigError(
                    f"Fused adapters cover all of {', '.join(FUSED[name])} or none; {missing} is no target. Target it, or set fused=False.",
                    field="target_modules",
                )


@contextmanager
def adapters_off(adapters: list[Lora]) -> Generator[None]:
    """Within it the model is what it was before training: the reference policy."""
    before = [lora.enabled for lora in adapters]
    for lora in adapters:
        lora.enabled = False
    try:
        yield
    finally:
        for lora, enabled in zip(adapters, before, strict=True):
            lora.enabled = enabled


@contextmanager
def merged(model: GPTModel) -> Generator[None]:
    """Within it the adapters are part of the layers' weights, and off beside them; afterwards the weights are bit-equal to before."""
    modules: list[Any] = list(model.modules())
    layers: list[tuple[Any, Lora]] = [(m, lora) for m in modules if isinstance(lora := getattr(m, ADAPTER, None), Lora)]
    kept = [layer.weight.detach().clone() for layer, _ in layers]
    with torch.no_grad():
        for layer, lora in layers:
            layer.weight.copy_(lora.merged(layer.weight))
    try:
        with adapters_off([lora for _, lora in layers]):
            yield
    finally:
        with torch.no_grad():
            for (layer, _), weight in zip(layers, kept, strict=True):
                layer.weight.copy_(weight)
