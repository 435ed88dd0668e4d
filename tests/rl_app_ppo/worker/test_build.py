"""The workers of a process that has several roles: they share the actor's weights."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import rl_transferqueue
from rl_app_ppo.config.loading import load_config, to_yaml
from rl_app_ppo.config.rollout_engines import ROLLOUT_ENGINES
from rl_app_ppo.config.training_backends import TRAINING_BACKENDS
from rl_app_ppo.worker import build
from rl_app_ppo.worker.build import build_workers
from rl_app_ppo.worker.messages import BuildCall
from rl_protocol import BatchData, ConfigError, RolloutError, ragged
from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_trainer import LoraConfig
from rl_trainer.rollout.hf_engine import HFRolloutEngine
from rl_transferqueue import TransferQueueConfig, start_local_plane

ROLES = ("actor", "ref", "rollout")
ASKED = [GenerationRequest(uid="p", session=0, prompt_ids=(2, 3, 4))]
SAMPLING = SamplingParams(max_new_tokens=4, temperature=1.0)


@pytest.fixture
def built(base_model, monkeypatch):
    """The workers of one process, in a function that runs a coroutine with them."""
    clients = []

    async def connect(descriptor):
        clients.append(await rl_transferqueue.connect(descriptor))
        return clients[-1]

    monkeypatch.setattr(build, "connect", connect)
    plane = start_local_plane(TransferQueueConfig(backend="memory", capacity_mb=8, segment_mb=1))

    def run(body, *overrides, roles=ROLES, **sent):
        config = load_config([f"model.path={base_model}", "placement=fused", *overrides])
        clients.clear()

        async def with_workers():
            call = BuildCall(
                config=to_yaml(config), model_path=str(base_model), plane=msgspec.json.encode(plane.descriptor), **sent
            )
            try:
                await body(await build_workers(roles, call))
            finally:
                assert len(clients) == 1, "the roles of a process share a client"
                await clients[0].close()

        asyncio.run(with_workers())

    yield run
    plane.close()


def places(model):
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


def parts(workers):
    """The policies of actor, reference and rollout."""
    (actor, _), (ref, _), (rollout, _) = (workers[role] for role in ROLES)
    return actor._backend, ref._backend, rollout._engine


ONES = [np.ones(4)] * 4
GIVEN = BatchData(
    {
        "prompts": ragged([[2, 3]] * 4, "int64"),
        "responses": ragged([[4, 5, 6, 7]] * 4, "int64"),
        "response_mask": ragged([[True] * 4] * 4, "bool"),
        "old_log_probs": ragged([-one for one in ONES], "float32"),
        "ref_log_prob": ragged([-one for one in ONES], "float32"),
        "advantages": ragged(ONES, "float32"),
        "values": ragged([0 * one for one in ONES], "float32"),
        "returns": ragged(ONES, "float32"),
    }
)


def train(policy):
    """One update of the policy, which changes its parameters in place."""
    policy.update_local(GIVEN, [[0, 1, 2, 3]], temperature=1.0)


def test_the_rollout_generates_with_the_actors_own_memory_before_and_after_a_sync(built):
    async def body(workers):
        policy, reference, engine = parts(workers)
        assert places(engine._model) == places(policy._model)
        assert not set(places(reference._model).values()) & set(places(policy._model).values())
        (first,) = await engine.generate(ASKED, SAMPLING)
        assert first.weight_version == 0
        train(policy)
        sender, receiver = workers["actor"][1], workers["rollout"][1]
        sent = await sender.send(1, 60.0)
        await receiver.receive(sent.manifest, 60.0)
        assert engine.weight_version == 0, "a received version is not active"
        await receiver.activate(1, 60.0)
        await sender.finalize(1)
        assert places(engine._model) == places(policy._model)
        (second,) = await engine.generate(ASKED, SAMPLING)
        assert second.weight_version == 1

    built(body, "actor.optim.lr=1e-2", "actor.optim.lr_warmup_steps=0")


def test_nothing_is_returned_that_was_generated_with_weights_of_no_version(built):
    """The actor has changed its weights in place, and the rollout still names the last version."""

    async def body(workers):
        policy, _, engine = parts(workers)
        await engine.generate(ASKED, SAMPLING)
        train(policy)
        with pytest.raises(RolloutError, match="generated with version 0 is dropped"):
            await engine.generate(ASKED, SAMPLING)

    built(body, "actor.optim.lr=1e-2", "actor.optim.lr_warmup_steps=0")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_merged_into_the_actors_base_as_into_a_copy(built, base_model, dtype):
    lora = LoraConfig(rank=4)

    async def body(workers):
        (actor, sender), (rollout, receiver) = (workers[role] for role in ("actor", "rollout"))
        policy, engine = actor._backend, rollout._engine
        base, held = places(policy._model), places(engine._model)
        merged = {f"{name}.weight": weight.data_ptr() for name, weight in engine._merged._base.items()}
        assert merged, "no module has an adapter"
        for name, place in merged.items():
            assert place == base[f"base_model.model.{name.removesuffix('.weight')}.base_layer.weight"]
            assert held[name] not in base.values(), "the merged weights are not the base"
        shared = {name for name in held if name not in merged and held[name] in base.values()}
        assert shared == (held.keys() - merged.keys() if dtype == "float32" else set())
        train(policy)
        sent = await sender.send(1, 60.0)
        await receiver.receive(sent.manifest, 60.0)
        await receiver.activate(1, 60.0)
        copied = HFRolloutEngine(base_model, dtype=dtype, lora=lora)
        copied.load_adapter(list(policy.adapter_weights()), 1)
        initial = HFRolloutEngine(base_model, dtype=dtype)._model.state_dict()
        assert any(not weight.equal(initial[name]) for name, weight in copied._model.state_dict().items())
        for name, weight in copied._model.state_dict().items():
            assert weight.equal(engine._model.state_dict()[name]), name

    learns = ("actor.optim.lr=1e-2", "actor.optim.lr_warmup_steps=0")
    built(body, "lora.rank=4", f"rollout.dtype={dtype}", *learns, roles=("actor", "rollout"))


@pytest.mark.parametrize("override", ["rollout.dtype=bfloat16", "checkpoint_engine.enabled=false"])
def test_a_rollout_that_can_not_share_has_its_own_weights(built, base_model, override):
    async def body(workers):
        policy, _, engine = parts(workers)
        assert not set(places(engine._model).values()) & set(places(policy._model).values())
        train(policy)
        (response,) = await engine.generate(ASKED, SAMPLING)
        assert response.weight_version == 0
        saved = load_file(base_model / "model.safetensors")
        name = next(iter(saved))
        held = engine._model.state_dict()[name]
        if held.dtype == policy._model.state_dict()[name].dtype:
            np.testing.assert_array_equal(held.numpy(), saved[name])

    built(body, override)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_policy_and_critic_have_adapters_on_one_base(built, base_model, dtype):
    """The critic computes and learns what it does on a base of its own."""
    found = []

    async def body(workers):
        critic = workers["critic"][0]._backend
        learnt = [
            critic.compute_values(GIVEN),
            critic.update_local(GIVEN, [[0, 1, 2, 3]]),
            critic.compute_values(GIVEN),
        ]
        found.append((learnt[0].ragged("values").values, learnt[1], learnt[2].ragged("values").values))
        frozen = {name: weight for name, weight in critic._model.named_parameters() if not weight.requires_grad}
        assert {weight.dtype for weight in frozen.values()} == {getattr(torch, dtype)}
        if "actor" not in workers:
            return
        policy = workers["actor"][0]._backend
        base, first = policy.base_weights(), load_file(base_model / "model.safetensors")
        for name, weight in frozen.items():
            whole = base[name.replace("body", "model").replace(".base_layer", "")]
            assert weight.data_ptr() == whole.data_ptr(), name
        for name, weight in base.items():
            assert name not in first or weight.equal(torch.from_numpy(first[name]).to(weight.dtype)), name
        train(policy)

    options = ["algorithm=ppo", "critic.use_lora=true", "lora.rank=2", f"torch.param_dtype={dtype}"]
    options += ["critic.optim.lr=1e-2", "critic.optim.lr_warmup_steps=0"]
    for roles in (("actor", "critic"), ("critic",)):
        built(body, *options, roles=roles)
    (before, metrics, after), (alone_before, alone_metrics, alone_after) = found
    assert np.array_equal(before, alone_before)
    assert np.array_equal(after, alone_after)
    assert metrics == alone_metrics
    assert not np.array_equal(before, after)


@pytest.mark.parametrize(("dtype", "shares"), [("bfloat16", True), ("float32", False)])
def test_a_rollout_shares_a_base_in_bfloat16_if_it_generates_in_it(built, dtype, shares):
    async def body(workers):
        policy, engine = workers["actor"][0]._backend, workers["rollout"][0]._engine
        base, held = set(places(policy._model).values()), places(engine._model)
        merged = {f"{name}.weight" for name in engine._merged._base}
        shared = {name for name, place in held.items() if place in base}
        assert shared == (held.keys() - merged if shares else set())

    options = ("lora.rank=4", "torch.param_dtype=bfloat16", f"rollout.dtype={dtype}")
    built(body, *options, roles=("actor", "rollout"))


def test_a_rollout_opens_the_data_files_of_the_run_alone(built, tmp_path):
    """A worker that replaces another one gets rows by number, so other rows would be taken."""
    file = tmp_path / "train.jsonl"
    row = {"data_source": "d", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
    file.write_text(json.dumps(row) + "\n")
    given = {"data.train_files": {str(file): hashlib.sha256(file.read_bytes()).hexdigest()}}
    options = [f"data.train_files={file}", "data.train_batch_size=1", "actor.ppo_mini_batch_size=1"]
    options += ["data.val_files=" + str(file), f"model.cache_dir={tmp_path / 'cache'}"]

    async def body(workers):
        assert sorted(workers) == ["rollout"]

    built(body, *options, roles=("rollout",), data_files=given)
    file.write_text(json.dumps(row | {"prompt": "2+2="}) + "\n")
    with pytest.raises(ConfigError, match=r"^data.train_files: \S+train.jsonl on \S+ is not the file that the driver"):
        built(body, *options, roles=("rollout",), data_files=given)


def test_an_adapter_of_the_critic_that_can_not_be_read_is_named_with_its_key(built, tmp_path):
    async def body(_workers):
        raise AssertionError("built")

    adapters = "algorithm=ppo", "critic.use_lora=true", "lora.rank=2"
    with pytest.raises(ConfigError, match=r"^critic\.adapter_path='.*gone' must be a PEFT folder"):
        built(body, *adapters, roles=("critic",), critic_adapter_path=str(tmp_path / "gone"))


@pytest.mark.parametrize("backend", TRAINING_BACKENDS.values(), ids=lambda backend: backend.name)
def test_the_builder_of_every_engine_is_there(backend):
    module, _, name = backend.build.partition(":")
    found = importlib.util.find_spec(module)  # Megatron-Core is not imported
    assert f"\ndef {name}(" in Path(found.origin).read_text()


def test_an_engine_of_a_plug_in_that_is_none_is_refused_by_name(built, monkeypatch):
    monkeypatch.setattr(type(ROLLOUT_ENGINES.get("hf")), "build", lambda self, setup: None)

    async def body(workers):
        raise AssertionError("the workers were built")

    with pytest.raises(ConfigError, match=r"rollout\.name='hf': .*\.build must return a RolloutEngine; got NoneType"):
        built(body, roles=("rollout",))
