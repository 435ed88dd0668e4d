"""From one format of an adapter to another; everything is written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from rl_megatron_peft.adapter import Adapter, read_adapter, write_adapter
from rl_megatron_peft.backend.exchange import scatter_adapter
from rl_megatron_peft.backend.learner import MiniBatchCounts, Reported
from rl_megatron_peft.backend.legacy import read_legacy
from rl_megatron_peft.backend.parallel import close_ranks, open_ranks
from rl_megatron_peft.backend.policy import MegatronPolicyBackend
from rl_megatron_peft.backend.resume import load_checkpoint, save_checkpoint
from rl_megatron_peft.config import LoraConfig
from rl_megatron_peft.errors import AdapterError
from rl_megatron_peft.folders import MANIFEST, FolderKind, folder_kind, refuse_unless_resumable
from rl_megatron_peft.layout import Layout
from rl_protocol import BatchData, ConfigError

Format = Literal["peft", "resume"]


def convert(
    source: Path, target: Path, *, to: Format, base: Path, alpha: float | None = None, fused: bool = False
) -> FolderKind:
    """Write a new folder with the adapter of another one; returns what the other one was.

    Args:
        source: a checkpoint to resume from, a PEFT folder, or verl's old `adapter_checkpoint`.
        target: the new folder.
        to: `peft`, or `resume`: with an optimizer that has made no step, unless the source has one.
        base: Hugging Face folder of the model the adapter is for.
        alpha: numerator of the scale, which verl's old format alone does not hold.
        fused: of a checkpoint to resume from: one A for the logical modules that Megatron fuses.

    Raises:
        AdapterError: a layout that can't be read, damaged, or of another base model; names file and field.
        ConfigError: arguments that do not fit together, or a base model that is not known.
        OutputError: `target` exists or can't be written.
    """
    kind = folder_kind(source)
    if (alpha is None) == (kind is FolderKind.LEGACY):
        raise ConfigError(
            f"alpha must be given for verl's old format, which does not hold it, and for no other; {source} holds {kind.value}.",
            field="alpha",
        )
    if (kind, to) in ((FolderKind.PEFT, "peft"), (FolderKind.RESUME, "resume")):
        raise ConfigError(f"{source} holds {kind.value} already; there is nothing to convert.", field="to")
    if kind is FolderKind.LEGACY:
        _write(read_legacy(source, base, alpha=alpha or 0.0), target, to, base, fused=fused, source=source)
    elif kind is FolderKind.PEFT:
        _write(read_adapter(source), target, to, base, fused=fused, source=source)
    else:
        refuse_unless_resumable(source)
        config, had_fused = _settings(source / MANIFEST)
        with _policy(base, config, fused=had_fused) as policy:
            load_checkpoint(policy, source)
            policy.save_pretrained(target)
    return kind


def _write(adapter: Adapter, target: Path, to: Format, base: Path, *, fused: bool, source: Path) -> None:
    if to == "peft":
        write_adapter(target, adapter)
        return
    config = dataclasses.replace(adapter.config, dropout=0.0)  # nothing is trained here
    with _policy(base, config, fused=fused) as policy:
        scatter_adapter(
            adapter,
            policy.adapters,
            adapter.config,
            policy.shape,
            policy.ranks,
            fingerprint=policy.fingerprint,
            source=str(source),
        )
        save_checkpoint(policy, target)


def _settings(manifest: Path) -> tuple[LoraConfig, bool]:
    """What the adapter of a checkpoint to resume from is, and whether it is fused."""
    fields: dict[str, Any] = json.loads(manifest.read_text())
    try:
        return LoraConfig.from_facts(fields), bool(fields["fused"])
    except (KeyError, TypeError, ValueError) as error:
        field = str(error.args[0]) if isinstance(error, KeyError) else getattr(error, "field", "target_modules")
        raise AdapterError(
            f"{manifest}: {field} is missing or wrong: {error}.", file=str(manifest), field=field
        ) from error


@contextmanager
def _policy(base: Path, config: LoraConfig, *, fused: bool) -> Generator[MegatronPolicyBackend]:
    """A policy in this process alone."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]: documented, but not in __all__
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield MegatronPolicyBackend(base, lora=config, loss=_no_loss, ranks=open_ranks(Layout()), fused=fused)
    finally:
        close_ranks()
        dist.destroy_process_group()


def _no_loss(
    log_prob: torch.Tensor, entropy: torch.Tensor, micro: BatchData, counts: MiniBatchCounts
) -> tuple[torch.Tensor, Reported]:
    del log_prob, entropy, micro, counts
    raise AssertionError("nothing is trained here")
