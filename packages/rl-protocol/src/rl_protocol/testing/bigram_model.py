"""In-memory PolicyBackend, CriticBackend, RolloutEngine and MetricSink for a bigram language model.

The model is one table of logits: the distribution of a token is the softmax of its predecessor's
row. Needs only numpy. For tests of training loops and of the conformance suites.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import RaggedColumn
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import RolloutError, WeightSyncError
from rl_protocol.ports import Generation, GenerationRequest, SamplingParams, WeightCapabilities

VOCABULARY = 8
EOS = 1
CONTEXT = 64
WEIGHT = "bigram.weight"
Floats = npt.NDArray[np.float32]


def initial_table(seed: int = 0) -> Floats:
    """float32 [VOCABULARY, VOCABULARY] logits."""
    return np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)


def log_softmax(table: Floats, temperature: float) -> Floats:
    """Row-wise log-probabilities of logits / temperature."""
    scaled = table / (temperature or 1.0)
    shifted = scaled - scaled.max(-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))).astype(np.float32)


def transitions(batch: BatchData) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The predecessor of every response token and the token itself, [T] each."""
    before: list[int] = []
    for prompt, response in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
        before += [int(prompt[-1]), *response.tolist()][: len(response)]
    return np.array(before, np.int64), batch.ragged("responses").values.astype(np.int64)


class BigramPolicy:
    """PolicyBackend: one policy-gradient step per update."""

    capabilities = WeightCapabilities()

    def __init__(self, *, learning_rate: float = 0.1, seed: int = 0) -> None:
        self._table = initial_table(seed)
        self._learning_rate = learning_rate

    def named_weights(self) -> Iterable[WeightTensor]:
        """Yield the table."""
        yield WeightTensor(WEIGHT, "float32", self._table.shape, self._table.copy().reshape(-1).view(np.uint8))

    def compute_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        log_p = log_softmax(self._table, temperature)
        before, token = transitions(batch)
        entropy = -(np.exp(log_p) * log_p).sum(-1)
        offsets = batch.ragged("responses").offsets
        return BatchData(
            {
                "log_probs": RaggedColumn(log_p[before, token], offsets, "float32"),
                "entropy": RaggedColumn(entropy[before].astype(np.float32), offsets, "float32"),
            }
        )

    def update(self, batch: BatchData, *, temperature: float) -> dict[str, float]:
        """Gradient ascent on sum(advantage * log-prob) over unmasked tokens."""
        before, token = transitions(batch)
        weight = batch.ragged("advantages").values * batch.ragged("response_mask").values
        gradient = np.zeros_like(self._table)
        np.add.at(gradient, (before, token), weight)
        total = np.zeros(VOCABULARY, np.float32)
        np.add.at(total, before, weight)
        gradient -= total[:, None] * np.exp(log_softmax(self._table, temperature))
        self._table = (self._table + self._learning_rate * gradient).astype(np.float32)
        return {"actor/grad_norm": float(np.linalg.norm(gradient))}

    def save_pretrained(self, path: Path) -> None:
        """Write the table as text."""
        path.mkdir(parents=True, exist_ok=True)
        np.savetxt(path / "bigram.txt", self._table)


class BigramCritic:
    """CriticBackend: one value per preceding token."""

    def __init__(self, *, learning_rate: float = 0.5) -> None:
        self._values = np.zeros(VOCABULARY, np.float32)
        self._learning_rate = learning_rate

    def compute_values(self, batch: BatchData) -> BatchData:
        before, _ = transitions(batch)
        return BatchData({"values": RaggedColumn(self._values[before], batch.ragged("responses").offsets, "float32")})

    def update(self, batch: BatchData) -> dict[str, float]:
        """Move every value towards the mean return after its token."""
        before, _ = transitions(batch)
        error = (batch.ragged("returns").values - self._values[before]) * batch.ragged("response_mask").values
        count = np.maximum(np.bincount(before, minlength=VOCABULARY), 1)
        step = np.bincount(before, weights=error, minlength=VOCABULARY) / count
        self._values = self._values + self._learning_rate * step.astype(np.float32)
        return {"critic/vf_loss": float(0.5 * np.mean(np.square(error))) if error.size else 0.0}


def letters(ids: Sequence[int]) -> str:
    """Token ids as text: a letter each, from `a` on; EOS has none."""
    return "".join(chr(ord("a") + token) for token in ids if token != EOS)


class BigramEngine:
    """RolloutEngine over the same table.

    Args:
        seed: of the table.
        decode: text of token ids, in which stop strings are searched.
    """

    capabilities = WeightCapabilities()

    def __init__(self, *, seed: int = 0, decode: Callable[[Sequence[int]], str] = letters) -> None:
        self._decode = decode
        self._table = initial_table(seed)
        self._version = 0

    @property
    def weight_version(self) -> int:
        """Version of the active table."""
        return self._version

    def load_weights(self, weights: Iterable[WeightTensor], version: int) -> None:
        given = {weight.name: weight for weight in weights}
        if given.keys() != {WEIGHT}:
            raise WeightSyncError(f"This engine has only the weight {WEIGHT!r}; got {sorted(given)}.")
        weight = given[WEIGHT]
        if (weight.dtype, weight.shape) != ("float32", self._table.shape):
            raise WeightSyncError(
                f"Weight {WEIGHT!r} must be float32 {self._table.shape}; got {weight.dtype} {weight.shape}."
            )
        self._table = weight.data.view(np.float32).reshape(weight.shape).copy()
        self._version = version

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        for request in requests:
            if not request.prompt_ids or len(request.prompt_ids) + params.max_new_tokens > CONTEXT:
                raise RolloutError(
                    f"Prompt {request.uid!r} has {len(request.prompt_ids)} tokens; it needs 1 to {CONTEXT - params.max_new_tokens}."
                )
        return [self._generate(request, params) for request in requests]

    def _generate(self, request: GenerationRequest, params: SamplingParams) -> Generation:
        digest = hashlib.sha256(f"{params.seed}/{request.uid}/{request.session}".encode()).digest()
        numbers = np.random.default_rng(list(digest)).random(params.max_new_tokens)
        log_p = log_softmax(self._table, params.temperature)
        tokens: list[int] = []
        stopped = False
        last = request.prompt_ids[-1]
        for number in numbers:
            row = log_p[last]
            share = np.cumsum(np.exp(row.astype(np.float64)))
            drawn = int(np.searchsorted(share, number * share[-1], side="right"))
            last = int(row.argmax()) if params.temperature == 0 else min(drawn, VOCABULARY - 1)
            tokens.append(last)
            stopped = self._ends(tokens, params)
            if stopped:
                break
        before = [request.prompt_ids[-1], *tokens[:-1]]
        return Generation(
            response_ids=tuple(tokens),
            log_probs=tuple(log_p[before, tokens].tolist()),
            finish_reason="stop" if stopped else "length",
            weight_version=self._version,
        )

    def _ends(self, tokens: Sequence[int], params: SamplingParams) -> bool:
        """Whether a response ends with its last token."""
        if tokens[-1] in params.stop_token_ids or (tokens[-1] == EOS and not params.ignore_eos):
            return True
        text = self._decode(tokens) if params.stop else ""
        return any(stop in text for stop in params.stop)


class ListSink:
    """MetricSink that keeps (step, metrics) in `records`."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a copy to `records`."""
        self.records.append((step, dict(metrics)))

    def close(self) -> None:
        """Nothing is buffered."""
