"""The Megatron-Core model of one rank: building it, loading its weights, exporting them."""
