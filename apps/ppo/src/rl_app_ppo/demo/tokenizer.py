"""The demo's tokenizer as transformers saves it."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from rl_app_ppo.demo.vocabulary import BOS, EOS, PAD, UNK, demo_tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """`demo_tokenizer` with its special tokens; it pads on the left."""
    return PreTrainedTokenizerFast(
        tokenizer_object=demo_tokenizer(),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
