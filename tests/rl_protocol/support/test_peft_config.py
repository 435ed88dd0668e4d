"""Fields of PEFT's adapter_config.json, compared with the installed LoraConfig."""

from __future__ import annotations

import dataclasses
import json

import peft
import pytest

from rl_protocol.support.peft_config import WITHOUT_EFFECT, unread_field

BASIC = {"r", "lora_alpha", "target_modules"}


def written(**settings):
    """Return the configuration as peft writes it."""
    fields = peft.LoraConfig(r=2, target_modules=["q_proj"], **settings).to_dict()
    return json.loads(json.dumps(fields, default=list))


def test_the_defaults_of_peft_are_read():
    assert unread_field(written(), BASIC) is None


@pytest.mark.parametrize(
    "field", sorted({f.name for f in dataclasses.fields(peft.LoraConfig)} - WITHOUT_EFFECT - BASIC)
)
def test_every_other_field_is_refused_unless_it_is_honored(field):
    fields = written() | {field: "something"}
    found = unread_field(fields, BASIC)
    assert found is not None
    assert found[0] == field
    assert "'something'" in found[1]
    assert unread_field(fields, {*BASIC, field}) is None


@pytest.mark.parametrize(
    ("saved", "field"), [(["classifier", "score"], None), (["score", "lm_head"], "modules_to_save")]
)
def test_modules_that_the_reader_reads_whole_may_be_saved(saved, field):
    found = unread_field(written(modules_to_save=saved), BASIC, ("classifier", "score"))
    assert (found and found[0]) == field


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "Gaussian", "orthogonal", "eva", "mica"])
def test_initializations_that_leave_the_base_as_it_is_change_nothing(start):
    assert unread_field(written() | {"init_lora_weights": start}, BASIC) is None


@pytest.mark.parametrize(
    "start", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "lora_ga", "loftq", "new", 2, ["pissa"]]
)
def test_initializations_that_may_have_changed_the_base_are_refused(start):
    found = unread_field(written() | {"init_lora_weights": start}, BASIC)
    assert found is not None
    assert found[0] == "init_lora_weights"
    assert repr(start) in found[1]
