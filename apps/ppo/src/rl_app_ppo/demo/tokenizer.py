"""The demo's tokenizer as transformers saves it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from rl_app_ppo.demo.vocabulary import BOS, EOS, PAD, UNK, VOCABULARY, demo_tokenizer


def build_tokenizer(vocabulary: Sequence[str] = VOCABULARY) -> PreTrainedTokenizerFast:
    """`demo_tokenizer` with its special tokens; it pads on the left."""
    return PreTrainedTokenizerFast(
        tokenizer_object=demo_tokenizer(vocabulary),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
