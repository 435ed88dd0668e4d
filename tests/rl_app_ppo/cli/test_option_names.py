"""The names in `--help`, `--explain` and the schema are those of the registries."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from rl_app_ppo.cli.main import help_text
from rl_app_ppo.cli.option_names import PLUGINS, help_of, names_of
from rl_app_ppo.config.loading import options
from rl_app_ppo.config.training_backends import TRAINING_BACKENDS
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl_trainer.config import registry

OPTIONS = {option.key: option for option in options()}


def test_every_option_that_packages_extend_has_a_registry_and_every_registry_an_option():
    assert {option.spec.plugins for option in OPTIONS.values()} - {""} == set(PLUGINS)


@pytest.mark.parametrize("key", sorted(key for key, option in OPTIONS.items() if option.spec.plugins))
def test_a_default_is_one_of_the_names(key):
    default = OPTIONS[key].default
    assert set(default if isinstance(default, tuple) else [default]) <= set(names_of(OPTIONS[key]).known)


def test_help_lists_the_names_of_the_registries():
    text = help_text()
    for key, names in (
        ("algorithm.adv_estimator", ADVANTAGE_ESTIMATORS.names()),
        ("model_engine", TRAINING_BACKENDS),
        ("algorithm.name", ("grpo", "ppo")),
        ("rollout.name", ("hf", "vllm")),
    ):
        assert all(name in help_of(OPTIONS[key]) for name in names), key
        assert help_of(OPTIONS[key]) in text


def test_an_estimator_of_an_installed_package_is_listed(monkeypatch):
    option = OPTIONS["algorithm.adv_estimator"]
    assert "mine" not in names_of(option).known
    offered = EntryPoint("mine", "package:MINE", option.spec.plugins)
    monkeypatch.setattr(registry, "installed_plugins", lambda group: (offered,) if group == option.spec.plugins else ())
    assert names_of(option).known[-1] == "mine"
    assert "mine; packages offer more under rl_trainer.advantage_estimators" in help_of(option)


def test_a_meaning_does_not_end_as_a_sentence():
    """The names of the values follow it, after a colon."""
    assert [key for key, option in OPTIONS.items() if option.spec.help.endswith((".", ":"))] == []
