"""Adapter checkpoints as verl wrote them before it wrote PEFT folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rl_megatron_peft import ModelShape

RANK = 4
FUSED = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}


def trained(shape: ModelShape, *, std: float = 1.0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return module -> (A, B), of a standard deviation; modules that Megatron fuses share an A."""
    rng = np.random.default_rng(3)
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for layer in range(shape.layers):
        for parts in FUSED.values():
            a = rng.normal(scale=std, size=(RANK, shape.linear(parts[0].split(".")[1])[1])).astype(np.float32)
            for part in parts:
                b = rng.normal(scale=std, size=(shape.linear(part.split(".")[1])[0], RANK)).astype(np.float32)
                found[f"model.layers.{layer}.{part}"] = (a, b)
    return found


def legacy_files(root: Path, shape: ModelShape, *, tensor: int, pipeline: int, std: float = 1.0) -> Path:
    """Write all ranks' files of verl's `save_adapter_checkpoint`; return the parent folder."""
    import torch

    pairs, folder = trained(shape, std=std), root / "adapter_checkpoint"
    folder.mkdir(parents=True)
    per_stage = shape.layers // pipeline
    for t in range(tensor):
        for p in range(pipeline):
            state = {}
            for local in range(per_stage):
                for fused, parts in FUSED.items():
                    whole = [pairs[f"model.layers.{local + p * per_stage}.{part}"] for part in parts]
                    a, rows = whole[0][0], [b for _, b in whole]
                    if fused.endswith(("linear_proj", "linear_fc2")):
                        own_a, own_b = np.split(a, tensor, axis=1)[t], np.split(rows[0], tensor)[t]
                    else:
                        own_a = np.split(a, tensor)[t]
                        own_b = fused_rows(fused, [np.split(b, tensor)[t] for b in rows], shape, tensor)
                    prefix = f"decoder.layers.{local}.{fused}.adapter"
                    state[f"{prefix}.linear_in.weight"] = torch.tensor(own_a)
                    state[f"{prefix}.linear_out.weight"] = torch.tensor(own_b)
            stage = f"_{p:03d}" if pipeline > 1 else ""
            torch.save({"adapter_state_dict": state}, folder / f"mp_rank_{t:02d}{stage}_adapter.pt")
    return root


def fused_rows(fused: str, parts: list[np.ndarray], shape: ModelShape, tensor: int) -> np.ndarray:
    """Return the fused rows of one rank.

    linear_fc1 holds gate, then up; linear_qkv holds the queries, key and value of each group.
    """
    if fused.endswith("linear_fc1"):
        return np.concatenate(parts)
    q, k, v = parts
    d, queries = shape.head_dim, shape.heads // shape.groups
    rows = []
    for group in range(shape.groups // tensor):
        rows += [q[group * queries * d : (group + 1) * queries * d], k[group * d : (group + 1) * d]]
        rows.append(v[group * d : (group + 1) * d])
    return np.concatenate(rows)
