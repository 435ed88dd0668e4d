"""Engines over a network: TCP, NIXL, Mooncake, torch.distributed."""
