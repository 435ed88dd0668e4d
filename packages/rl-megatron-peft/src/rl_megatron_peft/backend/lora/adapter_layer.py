"""The LoRA adapter of one fused linear layer of Megatron-Core.

Every logical module has its own B with rows in Hugging Face order. Canonical adapters also have an
A per logical module; fused ones, and those of experts, share one A. An adapter is therefore
exported by gathering its shards, without reordering.

Tensor parallelism splits B of linear_qkv and linear_fc1 by rows, and A of linear_proj and
linear_fc2 by columns. The other factor is the same on every rank and gets the same gradient there,
or with sequence parallelism the gradient of the rank's tokens. All factors are float32 whatever the
dtype of the model.

A layer of an expert gets the tokens of all tensor-parallel ranks from Megatron's dispatcher, which
adds up what these ranks return. So its adapter communicates nothing: the factor that is the same on
every rank gets a part of its gradient.

With DoRA each logical module also has the norms of its rows, `magnitude`, split as the rows of B. A
row of linear_proj or linear_fc2 is spread over all tensor-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from rl_megatron_peft.backend.lora.adapter_spec import AdapterSpec
from rl_megatron_peft.backend.lora.dropout import InputDropout, named_generator
from rl_megatron_peft.backend.model.fused_rows import fused_order, unfuse
from rl_megatron_peft.backend.parallel import Ranks, all_reduce_tensor_parallel
from rl_megatron_peft.base_model.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class LoraFactor:
    """One factor on this rank.

    Attributes:
        key: global name: `<Hugging Face or fused module>.lora_A`, `.lora_B` or
            `.lora_magnitude_vector`.
        parameter: this rank's shard.
        split: dimension that tensor parallelism splits; None: every rank holds the whole factor.
        partial: every tensor-parallel rank has a part of the gradient, to be summed.
    """

    key: str
    parameter: torch.nn.Parameter
    split: int | None
    partial: bool


class LoraLayer(torch.nn.Module):
    """Adds scaling * B A x for each target to the output of its layer.

    With DoRA the output becomes magnitude * (W + scaling * B A) x / norms, where norms are those of
    the rows of W + scaling * B A and pass no gradient. As in PEFT, dropout d applies to all inputs
    except those of the original layer:
    W x + (magnitude / norms - 1) * W d(x) + magnitude / norms * scaling * B A d(x).

    A depends on (seed, name) only, whatever the layout; B is zero, and magnitudes are the norms of
    the rows of W. So a new adapter changes nothing.

    Args:
        spec: what the adapter covers.
        shape: shape of the model.
        ranks: place of this process.
        base: weight of the layer on this rank.
        dora: use DoRA.
        seed: seed of A.
        dropout: drops inputs of the adapter.
    """

    def __init__(
        self,
        spec: AdapterSpec,
        shape: ModelShape,
        ranks: Ranks,
        *,
        base: torch.Tensor,
        dora: bool,
        seed: int,
        dropout: InputDropout,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.enabled = True
        self._dropout = dropout
        order = fused_order(shape, ranks.layout.tensor) if spec.module.fused == "linear_qkv" else None
        self._order = None if order is None else torch.tensor(order, device=base.device)
        self._unfuse = partial(unfuse, fused=spec.module.fused, shape=shape, tensor=ranks.layout.tensor)
        self.a = torch.nn.ParameterDict(
            {key: torch.nn.Parameter(_first_a(spec, key, ranks, seed).to(base.device)) for key in spec.a_ranks}
        )
        self.b = torch.nn.ParameterDict(
            {
                logical: torch.nn.Parameter(torch.zeros(spec.rows[logical], rank, device=base.device))
                for logical, rank in spec.ranks.items()
            }
        )
        norms = self._row_norms(base) if dora else {}
        self.magnitude = torch.nn.ParameterDict(
            {logical: torch.nn.Parameter(norms[logical].clone()) for logical in spec.ranks if dora}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scaling * B A d(x), [tokens, ..., out] of this rank in Megatron's row order."""
        return self._product(self._dropout(x))

    def adapted(
        self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the output of the layer with the adapter, given its output without it."""
        dropped = self._dropout(x)
        product = self._product(dropped)
        if not self.magnitude:
            return out + product
        scale = self._row_scale(weight)
        linear = (out if bias is None else out - bias) if dropped is x else self._linear(dropped, weight)
        return out + (scale - 1).to(out.dtype) * linear + scale.to(out.dtype) * product

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the layer's weight with the adapter merged in.

        With DoRA a collective over the tensor-parallel ranks.
        """
        if not self.magnitude:
            return weight + self.delta_weight().to(weight.dtype)
        return (self._row_scale(weight)[:, None] * (weight.float() + self.delta_weight())).to(weight.dtype)

    def delta_weight(self) -> torch.Tensor:
        """Return scaling * B A, this rank's shard in Megatron's order of rows."""
        columns = next(iter(self.a.values()))
        parts = [
            self.spec.scaling[name] * (self.b[name] @ self.a[self.spec.a_key(name)])
            if name in self.b
            else columns.new_zeros(rows, columns.shape[1])
            for name, rows in self.spec.rows.items()
        ]
        return self._ordered(torch.cat(parts), 0)

    def factors(self) -> Iterator[LoraFactor]:
        """Yield all factors in a fixed order; a shared A comes once, named for the fused module."""
        yield from map(self._a_factor, self.a)
        yield from map(self._b_factor, self.b)
        yield from map(self._magnitude_factor, self.magnitude)

    def factors_of(self, logical: str) -> dict[str, LoraFactor]:
        """Return `a`, `b` and with DoRA `magnitude` of a logical module."""
        found = {"a": self._a_factor(self.spec.a_key(logical)), "b": self._b_factor(logical)}
        return found | ({"magnitude": self._magnitude_factor(logical)} if self.magnitude else {})

    # -- factors

    def _a_factor(self, key: str) -> LoraFactor:
        return _factor(self.spec, self.spec.a_name(key), self.a[key], self.spec.a_split)

    def _b_factor(self, logical: str) -> LoraFactor:
        return _factor(self.spec, self.spec.b_name(logical), self.b[logical], self.spec.out_split)

    def _magnitude_factor(self, logical: str) -> LoraFactor:
        return _factor(self.spec, self.spec.magnitude_name(logical), self.magnitude[logical], self.spec.out_split)

    # -- products

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Return scaling * B A x."""
        scaling = self.spec.scaling
        low = torch.nn.functional.linear(x, torch.cat(list(self.a.values())).to(x.dtype))
        if self.spec.row_parallel:
            ((name, b),) = self.b.items()
            return scaling[name] * torch.nn.functional.linear(_reduced(low, self.spec), b.to(x.dtype))
        low = _gathered(low, self.spec)
        low_of = dict(zip(self.a, low.split([a.shape[0] for a in self.a.values()], dim=-1), strict=True))
        parts = [
            scaling[name] * torch.nn.functional.linear(low_of[self.spec.a_key(name)], self.b[name].to(x.dtype))
            if name in self.b
            else x.new_zeros(*low.shape[:-1], rows)
            for name, rows in self.spec.rows.items()
        ]
        return self._ordered(torch.cat(parts, dim=-1), -1)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return W x as the layer computes it, without the bias."""
        if self.spec.row_parallel:
            return _reduced(torch.nn.functional.linear(x, weight), self.spec)
        return torch.nn.functional.linear(_gathered(x, self.spec), weight)

    def _row_scale(self, weight: torch.Tensor) -> torch.Tensor:
        """Return DoRA's factor of each row, float32 [out] of this rank in Megatron's row order."""
        parts = [
            self.magnitude[name] / norms if name in self.magnitude else torch.ones_like(norms)
            for name, norms in self._row_norms(weight).items()
        ]
        return self._ordered(torch.cat(parts), 0)

    @torch.no_grad()
    def _row_norms(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the norms of the rows of W + scaling * B A, float32 [rows] per logical module."""
        squares = (weight.float() + self.delta_weight()).square().sum(1)
        if self.spec.row_parallel:
            all_reduce_tensor_parallel(squares)
        return dict(zip(self.spec.names, self._unfuse(squares.sqrt()), strict=True))

    def _ordered(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Bring rows of logical modules into Megatron's order."""
        return rows if self._order is None else rows.index_select(dim, self._order)


def _factor(spec: AdapterSpec, key: str, parameter: torch.nn.Parameter, split: int | None) -> LoraFactor:
    return LoraFactor(key, parameter, split, partial=spec.sequence_parallel and split is None)


def _gathered(x: torch.Tensor, spec: AdapterSpec) -> torch.Tensor:
    """Return x of all tokens: with sequence parallelism each rank has its own."""
    if spec.of_expert:
        return x
    gather = gather_from_sequence_parallel_region if spec.sequence_parallel else copy_to_tensor_model_parallel_region
    return gather(x)


def _reduced(x: torch.Tensor, spec: AdapterSpec) -> torch.Tensor:
    """Return x summed over ranks: of all tokens, or with sequence parallelism of this rank's."""
    if spec.of_expert:
        return x
    if spec.sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(x)
    return reduce_from_tensor_model_parallel_region(x)


def _first_a(spec: AdapterSpec, key: str, ranks: Ranks, seed: int) -> torch.Tensor:
    """Draw this rank's shard of an A as PEFT does: uniform within 1 / sqrt(columns)."""
    bound = 1 / math.sqrt(spec.columns)
    whole = torch.empty(spec.a_ranks[key], spec.columns).uniform_(
        -bound, bound, generator=named_generator(f"{seed}/{spec.module.name}.{key}")
    )
    return whole.chunk(ranks.layout.tensor, dim=1)[ranks.tensor].contiguous() if spec.row_parallel else whole
