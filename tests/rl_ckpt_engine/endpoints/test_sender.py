"""SenderEndpoint: sources that yield something else than weights."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from ckpt_fakes import Source

from rl_ckpt_engine import SenderEndpoint
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_protocol.errors import WeightSyncError


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_a_source_of_names_and_tensors_is_refused(dtype: str) -> None:
    pairs: Any = [("lm_head.weight", torch.zeros(2))]  # as verl's engines take them
    sender = SenderEndpoint(ShmEngine(), Source(pairs), dtype=dtype)
    with pytest.raises(
        WeightSyncError, match=r"yielded a tuple instead of a WeightTensor; .* rl_protocol\.torch\.to_w"
    ):
        asyncio.run(sender.send(1, 20))
    sender.close()
