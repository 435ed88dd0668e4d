"""The cache of the demo's model is checked before a run."""

from __future__ import annotations

import pytest

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.demo.cache import entry_path, publish
from rl_app_ppo.inputs.demo_model import check_demo_model, warm_up_settings
from rl_protocol import OutputError


@pytest.fixture
def config(tmp_path):
    return load_config([f"model.cache_dir={tmp_path / 'cache'}"])


def test_a_model_that_is_not_cached_needs_a_cache_that_can_be_written(config, tmp_path):
    assert check_demo_model(config) == f"the run makes it in {tmp_path / 'cache'}"
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_can_not_be_written_is_named_with_its_key(config, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OutputError, match=r"can't be written to .*cache: File exists\..*set model\.cache_dir"):
        check_demo_model(config)


def test_a_cached_model_and_a_model_of_the_user_need_to_write_nothing(config, tmp_path):
    def fill(folder):
        (folder / "config.json").write_text("{}")
        return {}

    publish(entry_path(tmp_path / "cache", warm_up_settings(config)), fill)
    assert check_demo_model(config) == "it is in the cache"
    own = load_config(["model.path=mine", "model.cache_dir=/proc/nowhere", "data.train_files=rows.jsonl"])
    assert check_demo_model(own) == "not used"
