"""LoRA on Megatron-Core: configuration, names and Hugging Face PEFT adapter folders. The backend is not part of this version."""

from rl_megatron_peft.adapter import Adapter, LoraPair, read_adapter, verify_adapter, write_adapter
from rl_megatron_peft.config import LoraConfig
from rl_megatron_peft.errors import AdapterError
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
    "HFModule",
    "LoraConfig",
    "LoraPair",
    "MegatronModule",
    "fused_targets",
    "hf_parameter",
    "megatron_parameter",
    "qkv_rows",
    "read_adapter",
    "verify_adapter",
    "write_adapter",
]
