"""LoRA on Megatron-Core: configuration, names, layouts and folders. The policy is in `rl_megatron_peft.backend`, with the extra `core`."""

from rl_megatron_peft.adapter import Adapter, LoraPair, read_adapter, verify_adapter, write_adapter
from rl_megatron_peft.base_model import fingerprint
from rl_megatron_peft.config import LoraConfig
from rl_megatron_peft.errors import AdapterError
from rl_megatron_peft.family import ModelShape
from rl_megatron_peft.folders import FolderKind, folder_kind, whole_checkpoints
from rl_megatron_peft.layout import Layout
from rl_megatron_peft.naming import (
    FUSED,
    TARGETS,
    HFModule,
    MegatronModule,
    fused_targets,
    hf_parameter,
    megatron_parameter,
    qkv_rows,
)

__version__ = "0.1.0"

__all__ = [
    "FUSED",
    "TARGETS",
    "Adapter",
    "AdapterError",
    "FolderKind",
    "HFModule",
    "Layout",
    "LoraConfig",
    "LoraPair",
    "MegatronModule",
    "ModelShape",
    "fingerprint",
    "folder_kind",
    "fused_targets",
    "hf_parameter",
    "megatron_parameter",
    "qkv_rows",
    "read_adapter",
    "verify_adapter",
    "whole_checkpoints",
    "write_adapter",
]
