"""Megatron-Core on the CPU: torch is restored afterwards."""

from __future__ import annotations

import pytest

from rl_protocol import ConfigError


def test_torch_is_as_it_was_after_computing_on_the_cpu():
    import torch

    from rl_megatron_peft.backend.capabilities import capabilities
    from rl_megatron_peft.backend.cpu_shims import cpu_compat

    if torch.cuda.is_available():
        with pytest.raises(ConfigError, match="leave it out"), cpu_compat():
            pass
        return
    before = torch.cuda.current_device, torch.cuda.synchronize
    with cpu_compat():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
    with pytest.raises(KeyError), cpu_compat():
        raise KeyError
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")
    assert capabilities().device == "cpu"
