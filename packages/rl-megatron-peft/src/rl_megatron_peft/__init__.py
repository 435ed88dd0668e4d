"""LoRA on Megatron-Core with Hugging Face PEFT checkpoints."""
