"""Names of the weights of experts, written out."""

from __future__ import annotations

import doctest

import pytest

from rl_megatron_peft import HFModule, MegatronModule
from rl_megatron_peft.base_model import experts
from rl_megatron_peft.base_model.experts import ExpertParameter, ExpertWeight

FC1 = "decoder.layers.2.mlp.experts.local_experts.7.linear_fc1"


def test_a_module_of_an_expert_has_its_number_in_both_names():
    module = MegatronModule(2, "linear_fc1", 7)
    assert module.name == FC1
    assert [part.name for part in module.parts] == [
        "model.layers.2.mlp.experts.7.gate_proj",
        "model.layers.2.mlp.experts.7.up_proj",
    ]
    assert HFModule(2, "up_proj", 7).megatron == module
    weight = ExpertWeight.parse(f"{FC1}.weight")
    assert weight is not None
    assert weight.hf_names(2) == tuple(f"{part.name}.weight" for part in module.parts)


@pytest.mark.parametrize(("name", "fused"), [("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")])
def test_a_parameter_of_transformers_holds_a_module_of_each_expert(name: str, fused: str):
    parameter = ExpertParameter.parse(f"model.layers.2.mlp.experts.{name}")
    assert parameter == ExpertParameter(2, name)
    module = parameter.megatron(7)
    assert module == MegatronModule(2, fused, 7)
    assert ExpertParameter.holding(module) == parameter
    assert parameter.logical == tuple(part.logical for part in module.parts)


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.mlp.experts.7.down_proj", "model.layers.2.mlp.down_proj", "model.layers.02.mlp.experts.down_proj"],
)
def test_other_names_are_none_of_such_a_parameter(name: str):
    assert ExpertParameter.parse(name) is None


def test_doctests():
    result = doctest.testmod(experts)
    assert result.attempted > 0
    assert result.failed == 0
