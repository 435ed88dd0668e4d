"""Convert adapters between checkpoints to resume from, PEFT folders and verl's old format."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rl_megatron_peft.backend.io.verl_legacy import read_legacy
from rl_megatron_peft.peft.adapter_folder import read_adapter, write_adapter
from rl_megatron_peft.peft.checkpoint_folders import FolderKind, folder_kind, refuse_unless_resumable
from rl_protocol import ConfigError

Format = Literal["peft", "resume"]


def convert(
    source: Path, target: Path, *, to: Format, base: Path, alpha: float | None = None, fused: bool = False
) -> FolderKind:
    """Write the adapter of a folder into a new folder in another format.

    Args:
        source: a checkpoint to resume from, a PEFT folder, or verl's old `adapter_checkpoint`.
        target: the new folder.
        to: `peft` or `resume`; a checkpoint to resume from starts with a new optimizer.
        base: Hugging Face folder of the base model.
        alpha: LoRA alpha; required for verl's old format, which does not store it.
        fused: with `resume`: share one A among the logical modules that Megatron fuses.

    Returns:
        The kind of the source.

    Raises:
        AdapterError: the source can't be read, is damaged, or has another base model; names file
            and field.
        ConfigError: the arguments contradict each other, or the base model is not supported.
        OutputError: `target` exists or can't be written.
    """
    kind = folder_kind(source)
    if kind in (FolderKind.UNKNOWN, FolderKind.UNFINISHED):
        refuse_unless_resumable(source)
    if (alpha is None) == (kind is FolderKind.LEGACY):
        raise ConfigError(
            f"alpha must be set for verl's old format, which does not store it, and only for that; {source} holds {kind.value}.",
            field="alpha",
        )
    if (kind, to) in ((FolderKind.PEFT, "peft"), (FolderKind.RESUME, "resume")):
        raise ConfigError(f"{source} holds {kind.value} already; there is nothing to convert.", field="to")
    if kind is FolderKind.LEGACY and to == "peft":  # needs no Megatron-Core
        write_adapter(target, read_legacy(source, base, alpha=alpha or 0.0))
        return kind
    # Megatron-Core: imports for seconds
    from rl_megatron_peft.backend.resume_conversion import adapter_to_resume, resume_to_adapter

    if kind is FolderKind.LEGACY:
        adapter_to_resume(read_legacy(source, base, alpha=alpha or 0.0), target, base, fused=fused, source=source)
    elif kind is FolderKind.PEFT:
        adapter_to_resume(read_adapter(source), target, base, fused=fused, source=source)
    else:
        resume_to_adapter(source, target, base)
    return kind
