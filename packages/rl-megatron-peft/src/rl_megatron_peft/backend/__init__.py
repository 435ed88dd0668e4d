"""Training on Megatron-Core, which needs the extra `core`.

`policy` and `critic` are the backends of a trainer; `resume` and `convert` work on checkpoints. The
modules import torch and Megatron; this one imports nothing.
"""
