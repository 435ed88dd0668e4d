"""The demo's tokenizer: one token per character."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_app_ppo.demo.arithmetic import ALPHABET

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCABULARY: tuple[str, ...] = (*ALPHABET, PAD, BOS, EOS, UNK)
"""Tokens by id."""
PAD_ID, BOS_ID, EOS_ID = (VOCABULARY.index(token) for token in (PAD, BOS, EOS))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A new tokenizer. It adds no special tokens, pads on the left, and decodes characters without spaces between them."""
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
