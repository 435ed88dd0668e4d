"""A tiny transformers model and batches for it; the modules of programs/ can be imported.

Their names are unique in the workspace.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rl_protocol import BatchData, ragged

sys.path.insert(0, str(Path(__file__).parent / "programs"))

VOCABULARY = ("<pad>", "<eos>", *"0123456789+=")


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """Folder with a Qwen2 model of 20 thousand parameters and 14 tokens, and its tokenizer."""
    from tokenizers import Tokenizer, models

    path = tmp_path_factory.mktemp("model")
    words = {word: i for i, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def training_batch():
    """Return a function from (policy, rows, seed) to the input of an update.

    The trajectories are ragged, with advantages, reference log-probs and a mask with holes.
    """

    def make(policy, rows=8, seed=0):
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(2, 14, rng.integers(1, 6)).tolist() for _ in range(rows)]
        responses = [rng.integers(1, 14, rng.integers(1, 8)).tolist() for _ in range(rows)]
        tokens = BatchData({"prompts": ragged(prompts, "int64"), "responses": ragged(responses, "int64")})
        old = policy.compute_log_probs(tokens, temperature=1.0)["log_probs"]
        masks = [[k == 0 or bool(rng.random() < 0.8) for k in range(len(r))] for r in responses]
        return BatchData(
            {
                **tokens.columns,
                "response_mask": ragged(masks, "bool"),
                "old_log_probs": old,
                "advantages": ragged([rng.normal(size=len(r)).tolist() for r in responses], "float32"),
                "ref_log_prob": ragged([(-2 + 0.1 * rng.normal(size=len(r))).tolist() for r in responses], "float32"),
            }
        )

    return make
