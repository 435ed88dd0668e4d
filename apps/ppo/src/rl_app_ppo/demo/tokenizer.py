"""The demos' vocabulary, mostly one token per character, and tokenizer. No transformers needed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from rl_app_ppo.demo.addition import ALPHABET

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCABULARY: tuple[str, ...] = (*ALPHABET, PAD, BOS, EOS, UNK)
"""Tokens by id."""
PAD_ID, BOS_ID, EOS_ID = (VOCABULARY.index(token) for token in (PAD, BOS, EOS))


def demo_tokenizer(vocabulary: Sequence[str] = VOCABULARY) -> Tokenizer:
    """Create a tokenizer that adds no special tokens and decodes without spaces.

    The longest token that fits is taken. Characters in a row that no token starts with become one
    UNK.
    """
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNK))
    words = "|".join(map(re.escape, sorted(vocabulary, key=len, reverse=True)))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{words}|(?:(?!{words})[\s\S])+"), "isolated")
    core.decoder = decoders.Fuse()
    return core
