"""A reward model as a scorer: transformers sequence classification with one label."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from rl_protocol import ConfigError
from rl_trainer.backends.loading import readable
from rl_trainer.backends.world import device_of
from rl_trainer.kernels.faster_layers import use_faster_layers
from rl_trainer.rewards.scorer import Failure, Outcome, Sample, outcome_of
from rl_trainer.rewards.scorer_toml import RewardModelConfig


class RewardModelScorer:
    """Scores a response with the model's logit for prompt and response.

    Calls are computed one after the other in one thread: two at a time would share the same cores,
    and GNU OpenMP lets its threads sleep at every barrier once two threads have used it.

    A sequence that the model can't take (too long, or with an unknown token) is a Failure of its
    sample. Sequences share a forward pass if the model defines padding (`pad_token_id`).

    Raises:
        ConfigError: the folder holds no such model, or the model has no trained head.
    """

    reads_tokens: bool = True
    compares: bool = True

    def __init__(self, settings: RewardModelConfig) -> None:
        self._device = device_of(settings.device)
        self._model = _load(Path(settings.path).expanduser()).to(self._device)
        config: Any = self._model.config
        self._pad_id: int | None = config.pad_token_id
        self._vocabulary = int(config.vocab_size)
        self._longest = int(getattr(config, "max_position_embeddings", 0)) or None
        self._max_tokens = settings.max_tokens
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-model")

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        outcomes: list[Outcome | None] = [self._refusal(sample.tokens) for sample in samples]
        rows = [i for i, outcome in enumerate(outcomes) if outcome is None]
        sequences = [samples[i].tokens for i in rows]
        logits = await asyncio.get_running_loop().run_in_executor(self._thread, self._logits, sequences)
        for row, logit in zip(rows, logits, strict=True):
            outcomes[row] = outcome_of(logit)
        return [outcome for outcome in outcomes if outcome is not None]

    async def close(self) -> None:
        """End the thread after the forward passes that it computes."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _refusal(self, tokens: Sequence[int]) -> Failure | None:
        if not tokens:
            return Failure(kind="exception", message="has no tokens to score")
        if self._longest is not None and len(tokens) > self._longest:
            message = f"has {len(tokens)} tokens; the reward model takes {self._longest}"
        elif max(tokens) >= self._vocabulary:
            message = f"holds token {max(tokens)}; the reward model knows {self._vocabulary}: it must share the policy's tokenizer"
        else:
            return None
        return Failure(kind="exception", message=message)

    def _logits(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """[N] the logit of each sequence."""
        logits = [0.0] * len(sequences)
        most = self._max_tokens if self._pad_id is not None else 1
        for rows in padded_batches([len(tokens) for tokens in sequences], most):
            for row, logit in zip(rows, self._forward([sequences[i] for i in rows]), strict=True):
                logits[row] = logit
        return logits

    def _forward(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        longest = max(map(len, sequences))
        ids = torch.full((len(sequences), longest), self._pad_id or 0)
        mask = torch.zeros((len(sequences), longest), dtype=torch.long)
        for row, tokens in enumerate(sequences):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        with torch.inference_mode():
            answer: Any = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device))
        return answer.logits[:, 0].float().tolist()


def padded_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row numbers of forward passes, rows of similar length together.

    No pass is above `max_tokens` tokens with padding, unless it is a single row.
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[row] <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _load(path: Path) -> Any:
    with readable(f"The reward model {path} can't be loaded by transformers"):
        model, facts = AutoModelForSequenceClassification.from_pretrained(
            str(path), dtype="auto", local_files_only=True, output_loading_info=True
        )
    missing = sorted(facts["missing_keys"])
    if missing:
        raise ConfigError(
            f"The reward model {path} holds no {', '.join(missing[:3])}: it is not trained for sequence classification, and would give random scores."
        )
    if model.config.num_labels != 1:
        raise ConfigError(f"The reward model {path} has {model.config.num_labels} labels; a reward has one.")
    use_faster_layers(model)
    return model.eval()
