"""`train(quiet=True)` silences the libraries that write its objects, and leaves them as before."""

from __future__ import annotations

import logging
import sys

import pytest
from datasets import Dataset, are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from huggingface_hub.utils import are_progress_bars_disabled as hub_is_silent
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from rl_app_ppo import train
from rl_app_ppo.cluster import ray_session

ROWS = [{"prompt": "1+2=", "data_source": "sums", "reward_model": {"ground_truth": "3"}}] * 64
BARS = ("Writing model shards", "Creating parquet")
WARNING = "a warning of transformers"


@pytest.fixture
def shown():
    """Bars and warnings are shown; the test's end restores what was set before."""
    transformers_logging.enable_progress_bar()
    enable_progress_bars()
    transformers_logging.set_verbosity_warning()


@pytest.fixture
def written(shown, monkeypatch, base_model, tmp_path, capfd):
    """A function that calls `train` with objects, without the run, and returns what was printed."""

    def launch(*arguments):
        transformers_logging.get_logger("transformers.tests").warning(WARNING)

    monkeypatch.setattr(ray_session, "check_ray_is_free", lambda config: None)
    monkeypatch.setattr(sys.modules["rl_app_ppo.api.train"], "launch", launch)
    for handler in transformers_logging.get_logger("transformers").handlers:
        if type(handler) is logging.StreamHandler:  # not one of pytest
            monkeypatch.setattr(handler, "stream", sys.stderr)  # that of this test
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))

    def call(name, *, quiet):
        capfd.readouterr()
        options = {"model.cache_dir": tmp_path / name}
        train(model, Dataset.from_list(ROWS), tokenizer=tokenizer, options=options, quiet=quiet)
        assert any(tmp_path.joinpath(name).glob("model-*/model.safetensors"))
        captured = capfd.readouterr()
        return captured.out + captured.err

    return call


def test_what_libraries_print_is_silenced_for_the_call(written):
    before = (transformers_logging.is_progress_bar_enabled(), are_progress_bars_disabled(), hub_is_silent())
    loud = written("loud", quiet=False)
    assert [text for text in (*BARS, WARNING) if text not in loud] == []
    assert written("quiet", quiet=True) == ""
    assert (transformers_logging.is_progress_bar_enabled(), are_progress_bars_disabled(), hub_is_silent()) == before
    again = written("again", quiet=False)
    assert [text for text in (*BARS, WARNING) if text not in again] == []


def test_bars_that_the_caller_has_hidden_stay_hidden(written):
    disable_progress_bars()
    assert written("quiet", quiet=True) == ""
    assert are_progress_bars_disabled()
