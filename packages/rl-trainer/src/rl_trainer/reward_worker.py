"""The worker that scores, and turns scores into advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import msgspec
import numpy as np

from rl_protocol import BatchData, KVBatchMeta, RewardError, RowKey, dense, ragged
from rl_protocol.ports import DataPlane, RewardFunction
from rl_trainer.algorithms.dapo import overlong_penalty, prompts_that_teach
from rl_trainer.algorithms.kl import adaptive_kl_coef
from rl_trainer.checkpoints.stateful import StatefulWorker, Write
from rl_trainer.columns import BASELINE_PARTITION
from rl_trainer.config import AlgorithmConfig, OverlongConfig, PolicyLossConfig
from rl_trainer.messages import FilterResult, StageCall, StageResult
from rl_trainer.metrics import mean_by_group, stats
from rl_trainer.scoring import Scoring, estimate_advantages
from rl_trainer.stages import StepGraph
from rl_trainer.worker import fetch, read, store

STATE = "worker.json"


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kl_coef: float


class RewardWorker(StatefulWorker):
    """Scores responses and turns scores into advantages, next to the data and without any model."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "reward": StageCall,
        "evaluate": StageCall,
        "filter": StageCall,
        "baseline": StageCall,
        "adv": StageCall,
        **StatefulWorker.state_handlers,
    }

    def __init__(
        self,
        plane: DataPlane,
        graph: StepGraph,
        reward: RewardFunction,
        decode: Callable[[Sequence[int]], str],
        algorithm: AlgorithmConfig,
        response_length: int,
        *,
        policy_loss: PolicyLossConfig | None = None,
        overlong: OverlongConfig | None = None,
        seed: int = 0,
    ) -> None:
        self._plane = plane
        self._graph = graph
        self._reward = reward
        self._decode = decode
        self._algorithm = algorithm
        self._response_length = response_length
        self._policy_loss = policy_loss or PolicyLossConfig()
        self._overlong = overlong or OverlongConfig()
        self._seed = seed
        self._kl_coef = algorithm.kl_ctrl.kl_coef

    async def reward(self, call: StageCall) -> StageResult:
        """Write `scores` and `acc` of every trajectory, and the parts of the reward that the estimator looks at.

        The last trajectory of a session is scored; the others are given its score.
        """
        stage = self._graph["reward"]
        data = await read(self._plane, call.batch, stage)
        final = final_rows(call.batch.keys)
        chosen = sorted(set(final))
        named = self._score(call.batch.select_rows(chosen), data.select_rows(chosen))
        scores, acc = _named(named, "score"), _named(named, "acc")
        metrics: dict[str, float] = {}
        if self._overlong.buffer_len:
            lengths = data.ragged("responses").lengths[chosen]
            penalty = overlong_penalty(
                lengths,
                max_length=self._response_length,
                buffer=self._overlong.buffer_len,
                factor=self._overlong.penalty_factor,
            )
            scores = (scores + penalty).astype(np.float32)
            metrics = stats("reward/overlong_penalty", penalty)
        parts = [[result[key] for key in self._algorithm.component_keys()] for result in named]
        columns = BatchData({"scores": dense(scores), "acc": dense(acc), "reward_components": ragged(parts, "float32")})
        place = {row: i for i, row in enumerate(chosen)}
        await store(self._plane, call.batch, stage, data, columns.select_rows([place[row] for row in final]))
        return StageResult(metrics=metrics)

    async def filter(self, call: StageCall) -> FilterResult:
        """Name the prompts whose sessions differ in what algorithm.filter_groups.metric says."""
        (name,) = self._graph["filter"].reads
        values = (await self._plane.get(call.batch, [name])).dense(name).values.astype(np.float64)
        return FilterResult(uids=tuple(prompts_that_teach([RowKey.parse(key) for key in call.batch.keys], values)))

    async def evaluate(self, call: StageCall) -> StageResult:
        """Score validation sessions and report means by data source: val-core/<source>/acc/mean@n, val-aux/<source>/score/mean@n."""
        batch = call.batch.select_rows(sorted(set(final_rows(call.batch.keys))))
        data = await fetch(self._plane, batch, self._graph["reward"].reads)
        named = self._score(batch, data)
        scores, acc = _named(named, "score"), _named(named, "acc")
        sources = data.objects("data_source").values()
        prompts = {RowKey.parse(key).uid for key in batch.keys}
        n = len(batch) // max(len(prompts), 1)
        metrics = {
            f"val-core/{source}/acc/mean@{n}": mean for source, mean in mean_by_group(acc.tolist(), sources).items()
        }
        metrics |= {
            f"val-aux/{source}/score/mean@{n}": mean for source, mean in mean_by_group(scores.tolist(), sources).items()
        }
        return StageResult(metrics=metrics)

    async def baseline(self, call: StageCall) -> StageResult:
        """Write `reward_baselines` of every trajectory: the score of the greedy response to its prompt, which has been scored before."""
        uids = [RowKey.parse(key).uid for key in call.batch.keys]
        place = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
        greedy = KVBatchMeta(partition=BASELINE_PARTITION, keys=tuple(RowKey(uid, 0).text for uid in place))
        scores = (await self._plane.get(greedy, ["scores"])).select_rows([place[uid] for uid in uids])
        columns = BatchData({"reward_baselines": scores["scores"]})
        await store(self._plane, call.batch, self._graph["baseline"], BatchData({}, len(call.batch)), columns)
        return StageResult(metrics=stats("critic/baseline", scores.dense("scores").values))

    async def adv(self, call: StageCall) -> StageResult:
        """Write `advantages`, `returns` and what else the updates read; report the statistics of the batch."""
        stage = self._graph["adv"]
        data = await read(self._plane, call.batch, stage)
        scoring = Scoring(
            algorithm=self._algorithm,
            policy_loss=self._policy_loss,
            response_length=self._response_length,
            kl_coef=self._kl_coef,
            rng=np.random.default_rng((self._seed, call.step)),
        )
        columns, metrics = estimate_advantages(call.batch, data, scoring)
        await store(self._plane, call.batch, stage, data, columns)
        control = self._algorithm.kl_ctrl
        if control.type == "adaptive" and "actor/reward_kl_penalty" in metrics:
            kl = metrics["actor/reward_kl_penalty"]
            self._kl_coef = adaptive_kl_coef(
                self._kl_coef, kl, target=control.target_kl, horizon=control.horizon, sequences=len(call.batch)
            )
        return StageResult(metrics=metrics)

    def copy_state(self, part: str) -> Mapping[str, Write]:
        """See StatefulWorker.copy_state: where the adaptive coefficient is."""
        state = _State(kl_coef=self._kl_coef)

        def write(folder: Path) -> Sequence[Path]:
            (folder / STATE).write_bytes(msgspec.json.encode(state))
            return [folder / STATE]

        return {part: write}

    def take_state(self, folder: Path) -> None:
        """See StatefulWorker.take_state."""
        self._kl_coef = msgspec.json.decode((folder / STATE).read_bytes(), type=_State).kl_coef

    def _score(self, batch: KVBatchMeta, data: BatchData) -> list[Mapping[str, float]]:
        """What the reward function says of each response: a finite `score`, `acc` (the score where it gives none), and its other numbers."""
        needed, out = ("score", *self._algorithm.component_keys()), list[Mapping[str, float]]()
        rows = zip(
            batch.keys,
            data.ragged("responses").rows(),
            data.objects("data_source").values(),
            data.objects("ground_truth").values(),
            strict=True,
        )
        for key, tokens, source, truth in rows:
            result = self._reward(source, self._decode(tokens.tolist()), truth)
            named = result if isinstance(result, Mapping) else {"score": result}
            for name in needed:
                if not _finite(named.get(name)):
                    what = "" if name == "score" else f" as {name!r}"
                    raise RewardError(
                        f"The reward function returned {named.get(name)!r}{what} for sample {key!r} of {source!r}; "
                        "it must return a finite number."
                    )
            out.append({"acc": named["score"], **named})
        return out


def final_rows(keys: Sequence[str]) -> list[int]:
    """[N] for each trajectory, the row that is scored for its session: the one with the highest index."""
    named = [RowKey.parse(key) for key in keys]
    last: dict[tuple[str, int], int] = {}
    for row, key in enumerate(named):
        known = last.get((key.uid, key.session))
        if known is None or named[known].index < key.index:
            last[key.uid, key.session] = row
    return [last[key.uid, key.session] for key in named]


def _named(results: Sequence[Mapping[str, float]], name: str) -> np.ndarray[Any, Any]:
    return np.array([result[name] for result in results], np.float32)


def _finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
