"""LoRA on Megatron-Core with Hugging Face PEFT checkpoints.

This module needs no torch. Training is in `rl_megatron_peft.backend`, which needs the extra `core`.
"""

from rl_megatron_peft.base_model.fingerprint import fingerprint
from rl_megatron_peft.base_model.layout import Layout
from rl_megatron_peft.base_model.model_shape import ModelShape
from rl_megatron_peft.base_model.naming import (
    FUSED,
    TARGETS,
    HFModule,
    MegatronModule,
    fused_targets,
    hf_parameter,
    megatron_parameter,
    qkv_rows,
)
from rl_megatron_peft.errors import AdapterError
from rl_megatron_peft.peft.adapter_folder import Adapter, LoraPair, read_adapter, verify_adapter, write_adapter
from rl_megatron_peft.peft.checkpoint_folders import FolderKind, folder_kind, whole_checkpoints
from rl_megatron_peft.peft.lora_config import LoraConfig
from rl_megatron_peft.peft.verl_files import VerlAdapterOptions, verl_adapter_options

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
    "VerlAdapterOptions",
    "fingerprint",
    "folder_kind",
    "fused_targets",
    "hf_parameter",
    "megatron_parameter",
    "qkv_rows",
    "read_adapter",
    "verify_adapter",
    "verl_adapter_options",
    "whole_checkpoints",
    "write_adapter",
]
