"""The record of a run, read by the path of its folder."""

from __future__ import annotations

import pytest

from rl_app_ppo.outputs.run_record import read_run
from rl_protocol import ConfigError


def test_a_folder_of_no_run_is_refused_and_one_of_a_run_may_lack_its_record(tmp_path):
    """A mistyped path read as a run that has not begun."""
    with pytest.raises(ConfigError, match=r"ouputs is no folder of a run, which has a config\.yaml"):
        read_run(tmp_path / "ouputs")
    (tmp_path / "config.yaml").write_text("")
    assert read_run(tmp_path).end is None
