"""The compute of a stage: nothing, sleep, or training a tiny policy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch

from ppo_step.graph import ACTOR, ALGORITHM, step_graph
from ppo_step.payloads import (
    FAMILIES,
    SESSIONS,
    VERSIONS,
    VOCABULARY,
    Family,
    Layout,
    lay_out,
    one_version,
    random_values,
    rollout_batch,
    row_lengths,
)
from rl_protocol import BatchData, ColumnSpec, DenseColumn, KVBatchMeta, ObjectColumn, RaggedColumn, RowKey, dense
from rl_protocol.batch.columns import Column, offsets_from_lengths
from rl_protocol.bridge import Declaration
from rl_protocol.torch import lent_tensor
from rl_trainer.algorithms.advantage_pipeline import AdvantageSettings, estimate_advantages
from rl_trainer.algorithms.losses.aggregate import BatchCounts
from rl_trainer.algorithms.losses.policy_objective import PolicyObjective, TokenColumns
from rl_trainer.algorithms.metrics import WeightedMeans

SLEEP_SHARES: Mapping[str, float] = {"rollout": 0.5, "old_log_prob": 0.1, "ref": 0.1, "update_actor": 0.3}
"""Share of each stage in the compute of a step."""
PAGE = 4096


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the comparison."""

    family: str
    layout: Layout
    rows: int
    workers: int
    compute_s: float = 0.0
    """Seconds of sleep in place of the models; 0: none."""
    real: bool = False
    """Train the tiny policy instead. Needs the ragged layout."""
    seed: int = 0

    def share(self, rank: int) -> range:
        """Rows that a worker rolls out."""
        size = self.rows // self.workers
        return range(rank * size, (rank + 1) * size)


class Compute(Protocol):
    """The columns a stage writes."""

    seconds: dict[str, float]
    """Seconds of each stage's last run; taking them clears them."""

    def stage(self, stage: Declaration, step: int, keys: Sequence[str], data: BatchData) -> BatchData:
        """The columns the stage writes, for N rows in the order of `keys`."""
        ...


def make_compute(workload: Workload, rank: int) -> Compute:
    """Make a worker's compute; rank -1 is the driver, which only scores."""
    return TinyPolicy(workload) if workload.real else Nothing(workload, rank)


def touch(batch: BatchData) -> int:
    """Read one byte of every page of every column."""
    return sum(
        int(buffer.reshape(-1).view(np.uint8)[::PAGE].sum())
        for column in batch.columns.values()
        for buffer in column.buffers
    )


class Nothing:
    """Read and write columns without computing; with `compute_s` sleep as long as a model takes."""

    def __init__(self, workload: Workload, rank: int) -> None:
        self._w = workload
        self._family = FAMILIES[workload.family]
        self.seconds: dict[str, float] = {}
        self._zeros: dict[str, np.ndarray] = {}
        lengths = row_lengths(self._family, workload.rows, workload.seed)
        self._rollout: BatchData | None = None
        if rank >= 0:
            writes, rows = step_graph(self._family)["rollout"].writes, workload.share(rank)
            self._rollout = rollout_batch(self._family, writes, lengths, rows, workload.layout, workload.seed)

    def stage(self, stage: Declaration, step: int, keys: Sequence[str], data: BatchData) -> BatchData:  # noqa: ARG002
        self.seconds[stage.name] = self._w.compute_s * SLEEP_SHARES.get(stage.name, 0.0)
        time.sleep(self.seconds[stage.name])
        if stage.name == "rollout":
            assert self._rollout is not None
            return self._rollout
        touch(data)
        return BatchData({name: self._blank(self._family.spec(name), data) for name in stage.writes}, len(data))

    def _blank(self, spec: ColumnSpec, data: BatchData) -> Column:
        responses = data["responses"]
        if spec.kind == "dense":
            return DenseColumn(self._memory(spec, (len(data),)), spec.dtype)
        if isinstance(responses, RaggedColumn):
            return RaggedColumn(self._memory(spec, (int(responses.offsets[-1]),)), responses.offsets, spec.dtype)
        return DenseColumn(self._memory(spec, (len(data), self._family.response)), spec.dtype)

    def _memory(self, spec: ColumnSpec, shape: tuple[int, ...]) -> np.ndarray:
        """Zeros in touched memory, as a model's output buffer has."""
        size = int(np.prod(shape))
        have = self._zeros.get(spec.name)
        if have is None or have.size < size:
            have = self._zeros[spec.name] = np.full(size, 0, spec.dtype)
        return have[:size].reshape(shape)


class TinyPolicy:
    """A bigram policy whose parameters depend on every column of the family.

    Uses the trainer's objective and estimator. Gradients are summed over all workers if
    torch.distributed is initialized.
    """

    def __init__(self, workload: Workload) -> None:
        if workload.layout != "ragged":
            raise ValueError("The tiny policy is trained on ragged columns; got the padded layout.")
        self._w = workload
        self.seconds: dict[str, float] = {}
        self._family: Family = FAMILIES[workload.family]
        torch.manual_seed(workload.seed)
        self.model = torch.nn.ModuleDict(
            {"embed": torch.nn.Embedding(VOCABULARY, 16), "head": torch.nn.Linear(16, VOCABULARY)}
        )
        self.model["context"] = torch.nn.Linear(1, 16)
        self._initial = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._optimiser = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self._objective = PolicyObjective(ACTOR, ALGORITHM.rollout_correction)

    def stage(self, stage: Declaration, step: int, keys: Sequence[str], data: BatchData) -> BatchData:
        start = time.perf_counter()
        out = getattr(self, f"_{stage.name}")(step, keys, stage.rename(data))
        self.seconds[stage.name] = time.perf_counter() - start
        return out.select_fields(stage.writes)

    # -- stages
    def _rollout(self, step: int, keys: Sequence[str], data: BatchData) -> BatchData:  # noqa: ARG002
        lengths = row_lengths(self._family, self._w.rows, self._w.seed)
        columns: dict[str, list[Column]] = {}
        for key in keys:
            name = RowKey.parse(key)
            row = int(name.uid.partition("-")[2]) * SESSIONS + name.session
            for field, column in self._one_row(step, row, {n: int(v[row]) for n, v in lengths.items()}).items():
                columns.setdefault(field, []).append(column)
        return BatchData.concat([BatchData({f: c[i] for f, c in columns.items()}) for i in range(len(keys))])

    def _one_row(self, step: int, row: int, lengths: Mapping[str, int]) -> dict[str, Column]:
        rng = np.random.default_rng((self._w.seed, step, row))

        def ragged_one(spec: ColumnSpec, values: np.ndarray) -> Column:
            return lay_out(RaggedColumn(values, offsets_from_lengths([len(values)]), spec.dtype), "ragged", 0)

        specs = {spec.name: spec for spec in (self._family.spec("prompts"), *self._family.extra)}
        out = {name: ragged_one(spec, random_values(spec, lengths[name], rng)) for name, spec in specs.items()}
        context = self._context(BatchData(out))
        token, tokens, log_probs = int(out["prompts"].buffers[0][-1]), list[int](), list[float]()
        with torch.no_grad():
            for _ in range(lengths["responses"]):
                logits = self._logits(torch.tensor([token]), context)[0].log_softmax(-1)
                token = int(
                    np.searchsorted(np.cumsum(logits.exp().double().numpy()), rng.random()).clip(0, VOCABULARY - 1)
                )
                tokens.append(token)
                log_probs.append(float(logits[token]))
        values = {
            "responses": np.array(tokens, np.int64),
            "response_mask": np.ones(len(tokens), np.bool_),
            "rollout_log_probs": np.array(log_probs, np.float32),
            VERSIONS: one_version(np.array([len(tokens)])),
        }
        out |= {name: ragged_one(self._family.spec(name), value) for name, value in values.items()}
        return out | {
            "data_source": ObjectColumn.from_values(["tiny"]),
            "ground_truth": ObjectColumn.from_values(["even"]),
            "extra_info": ObjectColumn.from_values([{}]),
        }

    def _reward(self, step: int, keys: Sequence[str], data: BatchData) -> BatchData:  # noqa: ARG002
        even = [float((row % 2 == 0).mean()) for row in data.ragged("responses").rows()]
        return BatchData(
            {"scores": dense(np.array(even, np.float32)), "acc": dense((np.array(even) > 0.5).astype(np.float32))}
        )

    def _old_log_prob(self, step: int, keys: Sequence[str], data: BatchData) -> BatchData:  # noqa: ARG002
        with torch.no_grad():
            log_probs, entropy = self._forward(data)
        return self._like_responses(data, old_log_probs=log_probs, entropy=entropy)

    def _ref(self, step: int, keys: Sequence[str], data: BatchData) -> BatchData:  # noqa: ARG002
        now = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self._initial)
        with torch.no_grad():
            log_probs, _ = self._forward(data)
        self.model.load_state_dict(now)
        return self._like_responses(data, ref_log_prob=log_probs)

    def _adv(self, step: int, keys: Sequence[str], data: BatchData) -> BatchData:
        scoring = AdvantageSettings(
            algorithm=ALGORITHM,
            policy_loss=ACTOR.policy_loss,
            response_length=self._family.response,
            kl_coef=0.0,
            rng=np.random.default_rng((self._w.seed, step)),
        )
        return estimate_advantages(KVBatchMeta(partition="train", keys=tuple(keys)), data, scoring)[0]

    def _update_actor(self, step: int, keys: Sequence[str], data: BatchData) -> BatchData:  # noqa: ARG002
        log_probs, entropy = self._forward(data)
        flat = {
            name: lent_tensor(data.ragged(name).values, data.ragged(name).dtype)
            for name in ("response_mask", "old_log_probs", "advantages", "ref_log_prob")
        }
        lengths = torch.from_numpy(data.ragged("responses").lengths)
        tokens = TokenColumns(
            old_log_prob=flat["old_log_probs"],
            advantages=flat["advantages"],
            mask=flat["response_mask"],
            row=torch.arange(len(data)).repeat_interleave(lengths),
            rows=len(data),
            ref_log_prob=flat["ref_log_prob"],
        )
        whole = row_lengths(self._family, self._w.rows, self._w.seed)["responses"]
        counts = BatchCounts(tokens=int(whole.sum()), sequences=self._w.rows)
        loss = self._objective(log_probs, entropy, tokens, counts, WeightedMeans())
        self._optimiser.zero_grad()
        loss.backward()
        self._sum_gradients()
        self._optimiser.step()
        return BatchData({}, len(data))

    # -- model
    def _context(self, data: BatchData) -> torch.Tensor:
        """[N, 16], from the mean of every row of every extra column."""
        sums = torch.zeros(len(data), 1)
        for spec in self._family.extra:
            for i, row in enumerate(data.ragged(spec.name).rows()):
                sums[i] += lent_tensor(row, spec.dtype).float().mean() / (1 if spec.dtype == "bfloat16" else VOCABULARY)
        return self.model["context"](sums)

    def _logits(self, tokens: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return self.model["head"](torch.tanh(self.model["embed"](tokens) + context))

    def _forward(self, data: BatchData) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy of every response token, [T] each."""
        prompts, responses = data.ragged("prompts"), data.ragged("responses")
        before = responses.values.copy()
        before[1:] = responses.values[:-1]
        before[responses.offsets[:-1]] = prompts.values[prompts.offsets[1:] - 1]
        rows = torch.from_numpy(np.repeat(np.arange(len(data)), responses.lengths))
        logits = self._logits(torch.from_numpy(before), self._context(data)[rows]).log_softmax(-1)
        chosen = logits.gather(1, torch.from_numpy(responses.values.copy())[:, None])[:, 0]
        return chosen, -(logits.exp() * logits).sum(-1)

    def _like_responses(self, data: BatchData, **columns: torch.Tensor) -> BatchData:
        offsets = data.ragged("responses").offsets
        return BatchData({name: RaggedColumn(value.numpy(), offsets, "float32") for name, value in columns.items()})

    def _sum_gradients(self) -> None:
        if torch.distributed.is_initialized():
            for parameter in self.model.parameters():
                torch.distributed.all_reduce(parameter.grad)

    def parameters(self) -> bytes:
        """Every parameter, bit by bit."""
        return b"".join(value.detach().numpy().tobytes() for value in self.model.state_dict().values())
