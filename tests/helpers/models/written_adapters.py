"""Adapters of a model as peft writes them, whose random weights change its log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_adapter(base_model: Path, folder: Path, *, std: float, **settings: Any) -> Path:
    """Write a LoRA adapter of rank 4 for `q_proj` and `down_proj`; return its folder.

    Args:
        base_model: folder of the model.
        folder: where to write.
        std: standard deviation of the weights of B, which peft starts at 0.
        settings: more of `peft.LoraConfig`.
    """
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **settings)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base_model), lora)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=std)
    model.save_pretrained(str(folder))
    return folder
