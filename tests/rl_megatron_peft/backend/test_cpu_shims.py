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
    names = ("current_device", "synchronize", "Stream", "stream", "current_stream")
    before = [getattr(torch.cuda, name) for name in names]
    with cpu_compat():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            stream.record_event().synchronize()
        assert torch.zeros(2, device="cuda").device.type == "cpu"
    with pytest.raises(KeyError), cpu_compat():
        raise KeyError
    assert [getattr(torch.cuda, name) for name in names] == before
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")
    assert capabilities().device == "cpu"
