"""Workers: they hold the models and move columns between the data plane and them. None knows Ray, torch or vLLM.

Every handler takes and returns one message, so that any process runtime can carry the calls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import msgspec
import numpy as np

from rl_protocol import BatchData, KVBatchMeta, ObjectColumn, RewardError, RowKey, Tag, WorkerError, dense, ragged
from rl_protocol.errors import UNREADABLE
from rl_protocol.ports import (
    CriticBackend,
    DataPlane,
    Generation,
    GenerationRequest,
    PolicyBackend,
    RewardFunction,
    RolloutEngine,
)
from rl_protocol.rl_columns import PROMPT_SCHEMA, prompt_partition
from rl_trainer.algorithms.kl import adaptive_kl_coef
from rl_trainer.columns import BASELINE_PARTITION, TRAINER_SCHEMA
from rl_trainer.config import AlgorithmConfig, PolicyLossConfig
from rl_trainer.data import PromptDataset
from rl_trainer.messages import RolloutCall, SaveCall, StageCall, StageResult
from rl_trainer.metrics import mean_by_group, stats
from rl_trainer.scoring import Scoring, estimate_advantages
from rl_trainer.stages import Stage, StepGraph

Handler = Callable[[Any], Awaitable[Any]]


class Worker:
    """Base of all workers: `handlers` names what can be called, with the type of each message."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {}

    async def handle(self, method: str, payload: bytes) -> bytes:
        """Decode the message, run the handler, encode its answer.

        Raises:
            WorkerError: no such handler, or a message that does not fit it.
        """
        kind = self.handlers.get(method)
        if kind is None:
            raise WorkerError(f"{type(self).__name__} has no handler {method!r}; it has {', '.join(self.handlers)}.")
        try:
            message = msgspec.msgpack.decode(payload, type=kind)
        except UNREADABLE as error:
            raise WorkerError(
                f"{type(self).__name__}.{method} was sent something that is not a {kind.__name__}: {error}."
            ) from error
        handler: Handler = getattr(self, method)
        return msgspec.msgpack.encode(await handler(message))


async def fetch(plane: DataPlane, batch: KVBatchMeta, fields: Sequence[str]) -> BatchData:
    """Columns of trajectories; those that belong to the prompt are read from its row once and repeated here.

    Raises:
        MissingDataError: see DataPlane.get.
    """
    own = [name for name in fields if name in TRAINER_SCHEMA]
    shared = [name for name in fields if name in PROMPT_SCHEMA]
    data = await plane.get(batch, own)
    if not shared:
        return data
    uids = [RowKey.parse(key).uid for key in batch.keys]
    place = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
    prompts = await plane.get(KVBatchMeta(partition=prompt_partition(batch.partition), keys=tuple(place)), shared)
    return prompts.select_rows([place[uid] for uid in uids]).union(data)


async def read(plane: DataPlane, batch: KVBatchMeta, stage: Stage) -> BatchData:
    """The columns the stage reads, under the names it knows them by.

    Raises:
        MissingDataError: see DataPlane.get.
    """
    return stage.rename(await fetch(plane, batch, stage.reads))


async def store(plane: DataPlane, batch: KVBatchMeta, stage: Stage, data: BatchData, made: BatchData) -> None:
    """Put exactly the columns the stage declares, checked against the schema together with `data`, which it read.

    Raises:
        SchemaError: a column of another type, or that does not align with one that was read; names key, column, expected and got.
    """
    columns = made.select_fields(stage.writes)
    own = data.select_fields([name for name in data.field_names if name in TRAINER_SCHEMA])
    TRAINER_SCHEMA.check(own.union(columns), batch.keys)
    await plane.put(batch.partition, batch.keys, columns)


class RolloutWorker(Worker):
    """Generates trajectories from prompts of its own copy of the data sets; the driver only names rows."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"rollout": RolloutCall}

    def __init__(self, plane: DataPlane, engine: RolloutEngine, datasets: Mapping[str, PromptDataset]) -> None:
        self._plane = plane
        self._engine = engine
        self._datasets = datasets

    async def rollout(self, call: RolloutCall) -> StageResult:
        """Generate, then put the prompt rows and the trajectory rows; tags carry step, weight version and lengths."""
        rows = [self._datasets[call.split][ref.row] for ref in call.prompts]
        requests = [
            GenerationRequest(uid=ref.uid, session=session, prompt_ids=row.prompt_ids)
            for ref, row in zip(call.prompts, rows, strict=True)
            for session in range(call.n)
        ]
        generations = await self._engine.generate(requests, call.sampling)
        prompts = BatchData(
            {
                "prompts": ragged([row.prompt_ids for row in rows], "int64"),
                "data_source": ObjectColumn.from_values(row.data_source for row in rows),
                "ground_truth": ObjectColumn.from_values(row.ground_truth for row in rows),
            }
        )
        PROMPT_SCHEMA.check(prompts)
        await self._plane.put(prompt_partition(call.partition), [ref.uid for ref in call.prompts], prompts)
        await self._put_trajectories(call, requests, generations)
        return StageResult()

    async def _put_trajectories(
        self, call: RolloutCall, requests: Sequence[GenerationRequest], generations: Sequence[Generation]
    ) -> None:
        responses = ragged([g.response_ids for g in generations], "int64")
        data = BatchData(
            {
                "responses": responses,
                "response_mask": dataclasses.replace(
                    responses, values=np.ones(responses.values.shape, np.bool_), dtype="bool"
                ),
                "rollout_log_probs": ragged([g.log_probs for g in generations], "float32"),
            }
        )
        TRAINER_SCHEMA.check(data)
        tags: list[Tag] = [
            {
                "step": call.step,
                "version": g.weight_version,
                "prompt_len": len(r.prompt_ids),
                "response_len": len(g.response_ids),
            }
            for r, g in zip(requests, generations, strict=True)
        ]
        await self._plane.put(call.partition, [RowKey(r.uid, r.session).text for r in requests], data, tags=tags)


class RewardWorker(Worker):
    """Scores responses and turns scores into advantages, next to the data and without any model."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "reward": StageCall,
        "evaluate": StageCall,
        "baseline": StageCall,
        "adv": StageCall,
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
        seed: int = 0,
    ) -> None:
        self._plane = plane
        self._graph = graph
        self._reward = reward
        self._decode = decode
        self._algorithm = algorithm
        self._response_length = response_length
        self._policy_loss = policy_loss or PolicyLossConfig()
        self._seed = seed
        self._kl_coef = algorithm.kl_ctrl.kl_coef

    async def reward(self, call: StageCall) -> StageResult:
        """Write `scores` and `acc` of every trajectory, and the parts of the reward that the estimator looks at."""
        stage = self._graph["reward"]
        data = await read(self._plane, call.batch, stage)
        named = self._score(call.batch, data)
        scores, acc = _named(named, "score"), _named(named, "acc")
        parts = [[result[key] for key in self._algorithm.component_keys()] for result in named]
        columns = BatchData({"scores": dense(scores), "acc": dense(acc), "reward_components": ragged(parts, "float32")})
        await store(self._plane, call.batch, stage, data, columns)
        return StageResult()

    async def evaluate(self, call: StageCall) -> StageResult:
        """Score validation trajectories and report means by data source: val-core/<source>/acc/mean@n, val-aux/<source>/score/mean@n."""
        data = await fetch(self._plane, call.batch, self._graph["reward"].reads)
        named = self._score(call.batch, data)
        scores, acc = _named(named, "score"), _named(named, "acc")
        sources = data.objects("data_source").values()
        prompts = {RowKey.parse(key).uid for key in call.batch.keys}
        n = len(call.batch) // max(len(prompts), 1)
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


def _named(results: Sequence[Mapping[str, float]], name: str) -> np.ndarray[Any, Any]:
    return np.array([result[name] for result in results], np.float32)


def _finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


class ActorWorker(Worker):
    """The policy under training."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "old_log_prob": StageCall,
        "update_actor": StageCall,
        "save": SaveCall,
    }

    def __init__(self, plane: DataPlane, graph: StepGraph, backend: PolicyBackend, temperature: float) -> None:
        self._plane = plane
        self._graph = graph
        self._backend = backend
        self._temperature = temperature

    async def old_log_prob(self, call: StageCall) -> StageResult:
        """Write `old_log_probs` and `entropy` under the policy before its update, and what else the backend gives and the stage declares."""
        stage = self._graph["old_log_prob"]
        data = await read(self._plane, call.batch, stage)
        out = self._backend.compute_log_probs(data, temperature=self._temperature)
        columns = BatchData({"old_log_probs": out["log_probs"], **out.columns})
        await store(self._plane, call.batch, stage, data, columns)
        return StageResult()

    async def update_actor(self, call: StageCall) -> StageResult:
        """Optimise the policy over the batch."""
        data = await read(self._plane, call.batch, self._graph["update_actor"])
        return StageResult(metrics=self._backend.update(data, temperature=self._temperature))

    async def save(self, call: SaveCall) -> StageResult:
        """Write the Hugging Face checkpoint."""
        self._backend.save_pretrained(Path(call.path))
        return StageResult()


class ReferenceWorker(Worker):
    """The frozen policy that the divergence is measured from."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"ref": StageCall}

    def __init__(self, plane: DataPlane, graph: StepGraph, backend: PolicyBackend, temperature: float) -> None:
        self._plane = plane
        self._graph = graph
        self._backend = backend
        self._temperature = temperature

    async def ref(self, call: StageCall) -> StageResult:
        """Write `ref_log_prob`."""
        stage = self._graph["ref"]
        data = await read(self._plane, call.batch, stage)
        out = self._backend.compute_log_probs(data, temperature=self._temperature)
        await store(self._plane, call.batch, stage, data, BatchData({"ref_log_prob": out["log_probs"]}))
        return StageResult()


class CriticWorker(Worker):
    """The value function under training."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"values": StageCall, "update_critic": StageCall}

    def __init__(self, plane: DataPlane, graph: StepGraph, backend: CriticBackend) -> None:
        self._plane = plane
        self._graph = graph
        self._backend = backend

    async def values(self, call: StageCall) -> StageResult:
        """Write `values` under the critic before its update."""
        stage = self._graph["values"]
        data = await read(self._plane, call.batch, stage)
        await store(self._plane, call.batch, stage, data, self._backend.compute_values(data))
        return StageResult()

    async def update_critic(self, call: StageCall) -> StageResult:
        """Optimise the value function over the batch."""
        data = await read(self._plane, call.batch, self._graph["update_critic"])
        return StageResult(metrics=self._backend.update(data))
