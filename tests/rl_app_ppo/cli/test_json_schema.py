"""`--schema` accepts the configurations that the loader accepts, and flags wrong ones."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from rl_app_ppo.cli.json_schema import DRAFT, json_schema
from rl_app_ppo.cli.main import main
from rl_app_ppo.config.full_keys import with_full_keys
from rl_app_ppo.config.loading import load_config, options, to_yaml

CHECK = jsonschema.Draft202012Validator(json_schema())


def errors(text: str) -> list[str]:
    return [error.json_path for error in CHECK.iter_errors(yaml.safe_load(text))]


def test_the_command_prints_a_schema_of_its_draft(capsys):
    assert main(["--schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(printed)
    assert printed["$schema"] == DRAFT
    assert printed == json_schema()


def test_every_option_has_a_description_and_its_default():
    found = json_schema()
    for option in options():
        node = found
        for part in option.key.split("."):
            node = next(one for one in node.get("anyOf", [node]) if "properties" in one)["properties"][part]
        assert with_full_keys(option.spec.help) in node["description"]
        assert node["default"] == (list(option.default) if option.is_list else option.default)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_resolved_configuration_is_valid(algorithm):
    assert errors(to_yaml(load_config([f"algorithm={algorithm}"]))) == []


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: ppo",
        "preset: [demo, mine.yaml]",
        "preset: demo,mine.yaml",
        "trainer: {logger: [console], profile_steps: [1, 2]}",
        "data: {seed: '${trainer.seed}'}",
        "reward: {function: '0.8*math,0.2*my.py:brief'}",
        "actor: {policy_loss: {loss_mode: 'my.py:LOSS'}}",
        "checkpoint_engine: {backend: delta-shm}",
        "rollout: {temperature: 1}",
    ],
)
def test_what_the_loader_accepts_is_valid(text):
    assert errors(text) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("rolout: {n: 8}", "$"),
        ("rollout: {nn: 8}", "$.rollout"),
        ("rollout: {n: 0}", "$.rollout.n"),
        ("rollout: {n: many}", "$.rollout.n"),
        ("rollout: {top_p: 1.5}", "$.rollout.top_p"),
        ("actor: {optim: {lr: -1}}", "$.actor.optim.lr"),
        ("actor: {policy_loss: {loss_mode: vanila}}", "$.actor.policy_loss.loss_mode"),
        ("algorithm: {adv_estimator: gea}", "$.algorithm"),
        ("algorithm: pppo", "$.algorithm"),
        ("model_engine: tourch", "$.model_engine"),
        ("trainer: {profile_steps: [0]}", "$.trainer.profile_steps"),
    ],
)
def test_what_the_loader_refuses_is_flagged_at_its_place(text, where):
    assert errors(text) == [where]
