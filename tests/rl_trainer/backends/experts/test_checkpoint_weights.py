"""Weights of experts are joined as transformers joins those of a checkpoint."""

from __future__ import annotations

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_protocol.torch import from_weight, to_weight
from rl_trainer.backends.experts.checkpoint_weights import joined_experts


def read(folder):
    """The weights of a checkpoint one by one, and the parameters of its model."""
    given = {name: to_weight(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    return given, AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_the_weights_of_a_checkpoint_become_those_of_its_model(moe_model):
    given, model = read(moe_model)
    wanted = {name: ("float32", tuple(tensor.shape)) for name, tensor in model.items()}
    found = joined_experts(given, wanted)
    assert found.keys() == wanted.keys()
    assert len(given) - len(found) == 2 * (4 * 3 - 2)
    assert all(from_weight(weight).equal(model[name]) for name, weight in found.items())


def test_parts_that_do_not_fit_stay_and_joined_weights_are_kept(moe_model):
    given, model = read(moe_model)
    wanted = {name: ("float32", tuple(tensor.shape)) for name, tensor in model.items()}
    joined = joined_experts(given, wanted)
    assert joined_experts(joined, wanted) == joined
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    found = joined_experts({name: weight for name, weight in given.items() if name != lost}, wanted)
    assert "model.layers.1.mlp.experts.gate_up_proj" not in found
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in found
    assert "model.layers.1.mlp.experts.down_proj" in found
    other = {name: ("bfloat16", shape) for name, (_, shape) in wanted.items()}
    assert joined_experts(given, other) == given
