"""What the command line and `train()` share."""

from __future__ import annotations

import gc

import pytest
from rich.console import Console

from rl_app_ppo.api.launch import launched
from rl_app_ppo.config.loading import load_config


@pytest.mark.parametrize(("before_s", "enabled"), [(0.5, True), (None, False)], ids=["a command", "a call"])
def test_garbage_is_collected_from_the_end_of_the_start_of_a_command(before_s, enabled):
    """A caller that has disabled garbage collection keeps it disabled."""
    config = load_config(["ray.address=127.0.0.1:1"])
    gc.disable()
    try:
        with launched(config, Console(quiet=True), before_s=before_s) as (startup, _):
            assert not gc.isenabled()
            startup.done()
            assert gc.isenabled() == enabled
    finally:
        gc.enable()
        gc.unfreeze()
