"""Convert adapters to and from checkpoints to resume from, with Megatron-Core on one rank."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl_megatron_peft.backend.lora.gather_adapter import scatter_adapter
from rl_megatron_peft.backend.parallel import close_ranks, open_ranks
from rl_megatron_peft.backend.policy import MegatronPolicyBackend
from rl_megatron_peft.backend.resume import load_checkpoint, save_checkpoint
from rl_megatron_peft.backend.train.mini_batches import MetricSums, MiniBatchCounts
from rl_megatron_peft.backend.train.settings import TrainSettings
from rl_megatron_peft.base_model.experts import ExpertParameter
from rl_megatron_peft.base_model.layout import Layout
from rl_megatron_peft.errors import bad_file
from rl_megatron_peft.peft.adapter_folder import Adapter
from rl_megatron_peft.peft.checkpoint_folders import MANIFEST, refuse_unless_resumable
from rl_megatron_peft.peft.lora_config import LoraConfig
from rl_protocol import BatchData


def adapter_to_resume(adapter: Adapter, target: Path, base: Path, *, fused: bool, source: Path) -> None:
    """Write a checkpoint to resume from with this adapter and a new optimizer.

    Raises:
        AdapterError: the adapter is of another base model than `base`.
        ConfigError: the base model is not supported.
        OutputError: `target` exists or can't be written.
    """
    config = adapter.config
    if any(ExpertParameter.parse(name) for name in adapter.pairs):  # these have no dropout in training
        config = dataclasses.replace(config, dropout=0.0)
    with _open_policy(base, config, fused=fused) as policy:
        scatter_adapter(
            adapter,
            policy.adapters,
            adapter.config,
            policy.shape,
            policy.ranks,
            fused=fused,
            fingerprint=policy.fingerprint,
            source=str(source),
        )
        save_checkpoint(policy, target)


def resume_to_adapter(source: Path, target: Path, base: Path) -> None:
    """Write the PEFT folder of a checkpoint to resume from.

    Raises:
        AdapterError, ConfigError, OutputError: as in `adapter_to_resume`; or the checkpoint is
            damaged.
    """
    refuse_unless_resumable(source)
    config, source_fused = _read_settings(source / MANIFEST)
    with _open_policy(base, config, fused=source_fused) as policy:
        load_checkpoint(policy, source)
        policy.save_pretrained(target)


def _read_settings(manifest: Path) -> tuple[LoraConfig, bool]:
    """Return the configuration of a checkpoint's adapter, and whether it is fused."""
    fields: dict[str, Any] = json.loads(manifest.read_text())
    try:
        return LoraConfig.from_manifest(fields), bool(fields["fused"])
    except (KeyError, TypeError, ValueError) as error:
        field = str(error.args[0]) if isinstance(error, KeyError) else getattr(error, "field", "target_modules")
        raise bad_file(manifest, field, f"is missing or wrong: {error}") from error


@contextmanager
def _open_policy(base: Path, config: LoraConfig, *, fused: bool) -> Generator[MegatronPolicyBackend]:
    """Open a policy in a process group of this process only."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]: documented, but not in __all__
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    settings = TrainSettings(fused=fused)
    try:
        yield MegatronPolicyBackend(base, lora=config, loss=_no_loss, ranks=open_ranks(Layout()), settings=settings)
    finally:
        close_ranks()
        dist.destroy_process_group()


def _no_loss(
    log_prob: torch.Tensor, entropy: torch.Tensor, micro: BatchData, counts: MiniBatchCounts
) -> tuple[torch.Tensor, MetricSums]:
    del log_prob, entropy, micro, counts
    raise AssertionError("convert trains nothing")
