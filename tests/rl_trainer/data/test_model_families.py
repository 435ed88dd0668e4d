"""Each family of models gives joined sequences the log-probs that it gives each of them alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_trainer.algorithms.log_probs import log_prob_columns
from rl_trainer.backends.output_head import OutputHead
from rl_trainer.backends.packing import PACKED_ATTENTION, PackedLayout, TokenNumbers, register_packed_attention
from rl_trainer.data.images import FAMILIES
from rl_trainer.data.model_families import JOINED_FAMILIES, why_padded

LENGTHS = [5, 9, 3]
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "moe_intermediate_size": 16}
COUNTS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4}
OF_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4}
TOKENS = {"vocab_size": 40, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny(family, **how):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **WIDTHS, **COUNTS, **EXPERTS, **OF_GPT2, **TOKENS)
    if getattr(config, "sliding_window", None):
        config.sliding_window = 4
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how).eval()


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.parametrize("family", JOINED_FAMILIES)
@torch.no_grad()
def test_joined_sequences_give_the_logits_of_each_alone(family):
    register_packed_attention()
    alone, joined = tiny(family), tiny(family, attn_implementation=PACKED_ATTENTION)
    joined.load_state_dict(alone.state_dict())
    sequences = [torch.randint(3, 40, (length,)) for length in LENGTHS]
    want = torch.cat([alone(input_ids=one[None], use_cache=False).logits[0] for one in sequences])
    found = joined(
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        layout=PackedLayout.of(TokenNumbers.of(np.array(LENGTHS), np.arange(3), np.zeros(3, np.int64))),
        use_cache=False,
    ).logits[0]
    assert (found - want).norm() < 1e-5 * want.norm()


SCALED = {"final_logit_softcapping": 0.5, "logit_scale": 0.5, "logits_scaling": 4.0}


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.parametrize("family", JOINED_FAMILIES)
@torch.no_grad()
def test_the_head_of_a_family_reads_what_its_logits_say(family):
    model = tiny(family)
    ids, places = torch.randint(3, 40, (2, 6)), torch.tensor([1, 4, 9])
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)[places]
    want = log_prob_columns(logits, places, 0.7, squares=True)
    head = OutputHead.of(model)
    assert (head is None) == (family in {"cohere", "cohere2"})  # they scale logits by default
    if head is not None:
        with head.reading(places, places, 0.7, squares=True):
            found = model(input_ids=ids, use_cache=False).logits
        assert (found - want).norm() < 1e-5 * want.norm()
    assert model(input_ids=ids, use_cache=False).logits.shape == (2, 6, 40)
    for name in SCALED.keys() & vars(model.config).keys():
        setattr(model.config, name, SCALED[name])
        assert OutputHead.of(model) is None


def test_other_families_are_padded():
    assert not any(map(why_padded, (*JOINED_FAMILIES, *FAMILIES)))
    assert why_padded("mamba") == "has model_type='mamba', for which joining sequences is not tested"
