"""Settings of a plane that nothing would read are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rl_protocol import ConfigError
from rl_transferqueue import TransferQueueConfig


@pytest.mark.parametrize("setting", [{"journal_dir": "/x"}, {"verify": True}])
def test_settings_of_the_journal_need_a_journal(setting: dict[str, Any]) -> None:
    TransferQueueConfig(**setting, durability="every_put")
    (key,) = setting
    wanted = rf"^{key} must be left out with durability=off"
    with pytest.raises(ConfigError, match=wanted):
        TransferQueueConfig(**setting)
