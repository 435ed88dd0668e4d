"""LoRA training on Megatron-Core: needs the extra `core`. Each module imports torch and Megatron; the package itself imports nothing."""
