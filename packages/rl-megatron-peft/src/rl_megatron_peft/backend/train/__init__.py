"""One optimizer step over all ranks: forward and backward passes, gradients, AdamW."""
