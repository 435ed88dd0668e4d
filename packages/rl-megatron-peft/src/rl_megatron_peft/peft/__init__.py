"""LoRA adapters in the format of Hugging Face PEFT: settings and folders. Needs no torch."""
