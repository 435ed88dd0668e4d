"""A GPTModel of Megatron-Core with the weights of a Hugging Face checkpoint: this rank's stage and shards of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rl_megatron_peft.backend.compat import runnable
from rl_megatron_peft.backend.parallel import Ranks, from_stage, whole_of_layer
from rl_megatron_peft.family import ModelShape
from rl_megatron_peft.layout import held_tensors, renumbered
from rl_megatron_peft.naming import qkv_rows
from rl_protocol.errors import ConfigError
from rl_protocol.hf_folder import safetensors_files

ADAPTER = "adapter"
"""Name of an adapter in the layer that it adapts, as Megatron-Bridge has it, which passes over parameters with it in their names."""

VALUE = "value"
"""Name of the linear layer in a value head."""


class RankNorm(torch.nn.RMSNorm):
    """RMSNorm over what a rank has. That of the local spec is the same but refuses sequence parallelism, which leaves a norm every number of
    its tokens; its weight then gets a share of the gradient on each rank, which `rl_megatron_peft.backend.trained` knows."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


def _layers(shape: ModelShape, ranks: Ranks) -> TransformerBlockSubmodules:
    """This stage's layers: the local spec's with our norms."""
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    layer: Any = spec.submodules
    norm: Any = RankNorm  # declared ModuleSpec, documented as a class as well
    layer.input_layernorm = layer.pre_mlp_layernorm = RankNorm
    if shape.qk_norm:
        layer.self_attention.submodules.q_layernorm = layer.self_attention.submodules.k_layernorm = RankNorm
    return TransformerBlockSubmodules([spec] * (shape.layers // ranks.layout.pipeline), layer_norm=norm)


def build_model(shape: ModelShape, ranks: Ranks, dtype: torch.dtype = torch.float32) -> GPTModel:
    """The model of this rank, with weights that are not set, on its device.

    Weights of the base are frozen, so that a tied output layer on a stage of its own is a copy that needs no synchronisation.

    Raises:
        ConfigError: the layout can't cut up the model.
    """
    layout = ranks.layout
    layout.check(shape)
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - there are no experts; with the default Megatron refuses variable lengths
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    with runnable():
        model = GPTModel(
            config,
            _layers(shape, ranks),  # pyright: ignore[reportArgumentType]: declared ModuleSpec, documented as either
            vocab_size=layout.padded_vocab(shape),
            max_sequence_length=shape.positions,
            pre_process=ranks.first,
            post_process=ranks.last,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied and layout.pipeline == 1,
            position_embedding_type="rope",
            rotary_base=shape.rope_base,  # pyright: ignore[reportArgumentType]: declared int, raised to powers
        )
    return model.requires_grad_(False).to(ranks.device, dtype).eval()


def first_layer(shape: ModelShape, ranks: Ranks) -> int:
    """Number in the whole model of this stage's first layer."""
    return ranks.pipeline * (shape.layers // ranks.layout.pipeline)


def base_parameters(model: GPTModel, shape: ModelShape, ranks: Ranks) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters without those of adapters and value heads; layers are numbered as in the whole model."""
    for name, parameter in model.named_parameters():
        if f".{ADAPTER}." not in name and f".{VALUE}." not in name:
            yield renumbered(name, first_layer(shape, ranks)), parameter


def fuse(parts: list[torch.Tensor], fused: str, shape: ModelShape, tensor: int) -> torch.Tensor:
    """Rows of q, k and v, or of gate and up, as the fused module of one of `tensor` ranks has them; a single part is itself."""
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    return joined[torch.tensor(fused_order(shape, tensor), device=joined.device)] if fused == "linear_qkv" else joined


def unfuse(weight: torch.Tensor, fused: str, shape: ModelShape, tensor: int) -> list[torch.Tensor]:
    """The inverse of `fuse`."""
    if fused == "linear_qkv":
        rows = qkv_rows(shape.heads // tensor, shape.groups // tensor, shape.head_dim)
        return [weight[torch.tensor(part, device=weight.device)] for part in rows]
    return list(weight.chunk(2)) if fused == "linear_fc1" else [weight]


def fused_order(shape: ModelShape, tensor: int) -> list[int]:
    """[rows of linear_qkv] which row of q, k and v joined each of them is, on one of `tensor` ranks."""
    q, k, v = qkv_rows(shape.heads // tensor, shape.groups // tensor, shape.head_dim)
    order = [0] * (len(q) + len(k) + len(v))
    for joined, row in enumerate([*q, *k, *v]):
        order[row] = joined
    return order


def _fused_name(parameter: str) -> str:
    return parameter.split(".")[-2]


class HFCheckpoint:
    """Tensors of a Hugging Face checkpoint folder, read in slices. Use as a context manager.

    Raises:
        ConfigError: a file is missing or damaged, a tensor is missing or has another shape; names file and tensor.
    """

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self._folder = folder
        self._shapes = shape.tensors()
        self._stack = ExitStack()
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> HFCheckpoint:
        for file in safetensors_files(self._folder):
            try:
                opened = self._stack.enter_context(safetensors.safe_open(file, framework="pt"))
            except (OSError, safetensors.SafetensorError) as error:
                raise ConfigError(f"{file}: file can't be read as safetensors: {error}.", field=str(file)) from error
            self._open[file] = opened
            self._file_of |= dict.fromkeys(opened.keys(), file)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shard(self, name: str, split: int | None, rank: int, of: int, rows: int | None = None) -> torch.Tensor:
        """This rank's part of a tensor, cut in dimension `split`, as if dimension 0 had `rows` (zeros behind the last)."""
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(f"{self._folder}: {name} is in none of its safetensors files.", field=name)
        piece = self._open[file].get_slice(name)
        found = tuple(piece.get_shape())
        if found != self._shapes[name]:
            raise ConfigError(
                f"{file}: {name} has shape {found}; config.json makes it {self._shapes[name]}.", field=name
            )
        if split is None:
            return piece[:]
        size = (rows or found[split]) // of
        begin, end = rank * size, (rank + 1) * size
        if split == 1:
            return piece[:, begin:end]
        part = piece[min(begin, found[0]) : min(end, found[0])]
        missing = size - part.shape[0]
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part


def load_base(model: GPTModel, folder: Path, shape: ModelShape, ranks: Ranks) -> None:
    """Fill this rank's parameters, reading what it holds and nothing else.

    Raises:
        ConfigError: see HFCheckpoint.
    """
    tensor, vocab = ranks.layout.tensor, ranks.layout.padded_vocab(shape)
    with HFCheckpoint(folder, shape) as checkpoint, torch.no_grad():
        for name, parameter in base_parameters(model, shape, ranks):
            rows = vocab if name.endswith(("word_embeddings.weight", "output_layer.weight")) else None
            held = held_tensors(name, tied=shape.tied)
            parts = [checkpoint.shard(part.name, part.split, ranks.tensor, tensor, rows) for part in held]
            parameter.copy_(fuse(parts, _fused_name(name), shape, tensor))


def base_weights(
    model: GPTModel, shape: ModelShape, ranks: Ranks, read: Callable[[str, torch.nn.Parameter], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the Hugging Face checkpoint, whole, on every rank: all must go through it, from beginning to end.

    Args:
        model: with or without adapters.
        shape, ranks: of it.
        read: (name, parameter) -> what to export in its place, such as the weight with its adapter merged in.
    """
    parameters = dict(base_parameters(model, shape, ranks))
    holder = {
        part.name: (name, i, part.split)
        for name in parameters
        for i, part in enumerate(held_tensors(name, tied=shape.tied))
    }
    dtype = next(iter(parameters.values())).dtype
    for hf_name, size in shape.tensors().items():
        stage = ranks.layout.stage(hf_name, shape)
        if stage == ranks.pipeline:
            name, part, split = holder[hf_name]
            weight = unfuse(read(name, parameters[name]), _fused_name(name), shape, ranks.layout.tensor)[part]
            whole = whole_of_layer(weight, split)[: size[0]].contiguous()
        else:
            whole = torch.empty(size, dtype=dtype, device=ranks.device)
        yield hf_name, from_stage(whole, stage)
