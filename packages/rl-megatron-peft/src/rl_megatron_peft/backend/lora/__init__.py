"""LoRA adapters beside the layers of a Megatron-Core model."""
