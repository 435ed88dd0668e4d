"""The workers of a run, built from its configuration, are on a GPU with all that they compute.

The device is the only changed option. The GPU is one of fake tensors: a tensor that was left on the
CPU is an error, and names, types and shapes are compared with those of the CPU.
"""

from __future__ import annotations

import asyncio
import json

import msgspec
import numpy as np
import pytest
import torch
from fake_gpu import GPU, FakeGpu
from fake_ranks import FakeRanks
from safetensors import safe_open
from this_thread import ThisThread
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForSequenceClassification
from trust import trust

from rl_app_ppo.config.loading import load_config, to_yaml
from rl_app_ppo.worker import build
from rl_app_ppo.worker.build import build_workers
from rl_app_ppo.worker.messages import BuildCall
from rl_ckpt_engine.payload.manifest import Manifest
from rl_protocol import BatchData, ObjectColumn, ragged
from rl_protocol.ports import Lease, SamplingParams
from rl_protocol.rl_columns import prompt_partition
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer.backends import reward_model
from rl_trainer.backends.snapshot import PLACES
from rl_trainer.workers.messages import (
    FinishSaveCall,
    LeasedPrompt,
    LoadStateCall,
    Partition,
    RolloutCall,
    SaveStateCall,
    StageCall,
)
from rl_transferqueue.wire.descriptor import ControllerAddress, PlaneDescriptor
from rl_transferqueue.wire.process_liveness import ProcessId

LENGTHS, TRAIN = (3, 5, 2, 4), "train"
"""Tokens of the responses of the trajectories, and their partition."""
PROMPTS, KEYS = ("p0", "p1"), ("p0/0/0", "p0/1/0", "p1/0/0", "p1/1/0")
PPO = (
    *("algorithm=ppo", "actor.use_kl_loss=true", "rollout.n=2", "data.train_batch_size=2"),
    *("actor.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=2"),
)
TRAINED, PART = ("actor", "critic"), "part"
MADE = {"old_log_prob": ("old_log_probs", "entropy"), "ref": ("ref_log_prob",), "values": ("values",)}
"""Columns that a stage writes."""
TIMEOUT_S = 60.0
DESCRIPTOR = PlaneDescriptor(
    controller=ControllerAddress("", ProcessId(1, 1), 0, 0), units=(), host="", shared_memory=False,
    plane="", backend="memory", backend_address="", timeout_s=TIMEOUT_S, read_cache_mb=0,
)  # fmt: skip
"""Of no plane: the workers get another."""


@pytest.fixture
def plane(monkeypatch):
    """The data plane of the workers, which compute in this thread: another has no fake GPU."""
    made = MemoryDataPlane()

    async def connect(_):
        return made

    monkeypatch.setattr(build, "connect", connect)
    monkeypatch.setattr(reward_model, "ThreadPoolExecutor", ThisThread)
    return made


async def built(roles, model, *overrides):
    """The workers of a process, from the configuration of a run."""
    config = load_config([f"model.path={model}", *PPO, *overrides])
    call = BuildCall(config=to_yaml(config), model_path=str(model), plane=msgspec.json.encode(DESCRIPTOR))
    return await build_workers(roles, call)


async def put_rows(plane):
    """Trajectories, as rollouts and advantage stages leave them."""
    rng = np.random.default_rng(0)
    prompts = {
        "prompts": ragged([[2, 3], [4]], "int64"),
        "data_source": ObjectColumn.from_values(["demo"] * 2),
        "ground_truth": ObjectColumn.from_values(["5"] * 2),
        "extra_info": ObjectColumn.from_values([{}] * 2),
    }
    await plane.put(prompt_partition(TRAIN), PROMPTS, BatchData(prompts))
    numbers = ("rollout_log_probs", "rollout_is_weights", "advantages", "returns")
    mask = ragged([[True] * length for length in LENGTHS], "bool")
    rows = {
        "responses": ragged([rng.integers(2, 9, length).tolist() for length in LENGTHS], "int64"),
        **dict.fromkeys(("response_mask", "loss_mask"), mask),
        **{name: ragged([rng.normal(size=length).tolist() for length in LENGTHS], "float32") for name in numbers},
    }
    return (await plane.put(TRAIN, KEYS, BatchData(rows))).without_tags()


async def computed(plane, workers, mini_batches=None):
    """Names, types and shapes of what the trained roles compute in a step and send after it.

    Without the measurements of updates, which only those on a GPU have.
    """
    rows = await put_rows(plane)
    call = StageCall(step=1, batch=rows, mini_batches=mini_batches, updates=1)
    found = {}
    for stage, names in MADE.items():
        role = next(worker for worker, _ in workers.values() if stage in worker.handlers)
        await role.run(stage, call)
        for name in names:
            column = (await plane.get(rows, [name])).ragged(name)
            assert column.lengths.tolist() == list(LENGTHS)
            found[name] = column.dtype
    for role in TRAINED:
        metrics = (await workers[role][0].run(f"update_{role}", call)).metrics
        found[role] = {name for name in metrics if not name.startswith("perf/")}
    sent = await workers["actor"][1].send(1, TIMEOUT_S)
    found["sent"] = {(entry.name, entry.dtype, entry.shape) for entry in Manifest.decode(sent.manifest).tensors}
    return found


async def saved(worker, folder):
    """Tensor of a worker's checkpoint -> shape of the whole and first row, type, shape here."""
    await worker.run("save_state", SaveStateCall(path=str(folder), part=PART))
    files = (await worker.run("finish_save", FinishSaveCall())).files
    (data,) = (folder / name for name in files if name.startswith(f"{PART}/") and name.endswith(".safetensors"))
    with safe_open(data, framework="pt") as file:
        places = json.loads(file.metadata()[PLACES])
        slices = {name: file.get_slice(name) for name in places}
        return {name: (places[name], own.get_dtype(), own.get_shape()) for name, own in slices.items()}


def tensors_of(worker):
    """Parameters, buffers and optimizer state of a worker's model, of which its own part."""
    backend = worker._backend
    found = [*backend._model.parameters(), *backend._model.buffers()]
    if backend._optimizer is not None:
        found += backend._optimizer.moments().values()
    return [one.to_local() if isinstance(one, DTensor) else one for one in found]


PACKED, PADDED = (
    tuple(f"{role}.use_remove_padding={packed}" for role in ("actor", "critic")) for packed in ("true", "false")
)
CORRECTION = (
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_rs=[token_k1]",
    "algorithm.rollout_correction.rollout_rs_threshold=['0.1_8']",
)
CASES = {
    "full packed bfloat16": (*PACKED, "torch.param_dtype=bfloat16", *CORRECTION),
    "full padded": (*PADDED, "actor.kl_loss_topk=3"),
    "lora packed": (*PACKED, "lora.rank=2", "lora.dropout=0.5", "critic.use_lora=true"),
    "dora padded bfloat16": (*PADDED, "torch.param_dtype=bfloat16", "lora.rank=2", "lora.use_dora=true"),
}


def roles_of(options):
    """The trained roles; with adapters the actor is its own reference."""
    return ("actor", "critic") if "lora.rank=2" in options else ("actor", "ref", "critic")


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_step_and_its_checkpoint_are_those_of_the_cpu(plane, base_model, tmp_path, options):
    roles = roles_of(options)

    async def step(device):
        workers = await built(roles, base_model, "model_engine=torch", *options, f"torch.device={device}")
        found = await computed(plane, workers)
        return workers, found, {role: await saved(workers[role][0], tmp_path / device / role) for role in TRAINED}

    _, *wanted = asyncio.run(step("cpu"))
    with FakeGpu():
        workers, *found = asyncio.run(step("cuda"))
        assert found == wanted
        for role in roles:
            assert {tensor.device for tensor in tensors_of(workers[role][0])} == {GPU}
        for role in TRAINED:
            state = LoadStateCall(path=str(tmp_path / "cuda" / role / PART))
            asyncio.run(workers[role][0].run("load_state", state))


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ((*PACKED, "rollout.dtype=bfloat16"), "param_dtype=bfloat16"),
        ((*PADDED, "lora.rank=2"), "activation_checkpointing=true"),
    ],
    ids=["full packed bfloat16", "lora padded recomputed"],
)
def test_a_rank_of_two_has_its_half_of_a_model_on_its_gpu_and_sends_all_of_it(
    plane, base_model, tmp_path, options, more
):
    """FSDP2; what a rank computes and sends has the names, types and shapes of the torch engine."""
    roles = roles_of(options)

    async def step(*device):
        workers = await built(roles, base_model, *options, *device)
        return workers, await computed(plane, workers, mini_batches=((0, 1), (2, 3)))

    _, wanted = asyncio.run(step("model_engine=torch", "torch.device=cpu"))
    with FakeRanks():
        fsdp = ("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cuda", f"fsdp.{more}")
        workers, found = asyncio.run(step(*fsdp))
        assert found == wanted
        for role in roles:
            assert {tensor.device for tensor in tensors_of(workers[role][0])} == {GPU}
        state = asyncio.run(saved(workers["actor"][0], tmp_path))
    for name, ((shape, first), _, own) in state.items():
        assert first == 0, "this is the first rank"
        assert own == ([-(-shape[0] // 2), *shape[1:]] if shape else []), name


@pytest.mark.parametrize("adapters", [(), ("lora.rank=2",)], ids=["full", "lora"])
def test_a_rollout_generates_with_the_weights_that_it_receives(plane, base_model, adapters):
    """One process, whose rollout shares a base of adapters."""
    fused = ("model_engine=torch", "placement=fused", "torch.device=cuda", "rollout.device=cuda", *adapters)

    async def synced():
        workers = await built(("actor", "critic", "rollout"), base_model, *fused)
        (_, sender), (rollout, receiver) = workers["actor"], workers["rollout"]
        sent = await sender.send(1, TIMEOUT_S)
        await receiver.receive(sent.manifest, TIMEOUT_S)
        await receiver.activate(1, TIMEOUT_S)
        leases = [Lease(TRAIN, uid, 0, (0, 1), 0, TIMEOUT_S) for uid in PROMPTS]
        sampling = SamplingParams(max_new_tokens=4, temperature=0.7, top_k=3, ignore_eos=True)
        partition = Partition(name=TRAIN, split="train", step=1, n=2, sampling=sampling)
        prompts = tuple(LeasedPrompt(lease, row) for row, lease in enumerate(leases))
        await rollout.run("rollout", RolloutCall(partition=partition, prompts=prompts))
        assert {one.device for one in rollout._engine._model.parameters()} == {GPU}
        return await plane.list_rows(TRAIN)

    with FakeGpu():
        rows = asyncio.run(synced())
    assert sorted(rows.keys) == sorted(KEYS)
    assert set(rows.tag_values("version")) == {1}


def test_a_reward_model_scores_on_the_gpu(plane, base_model, tmp_path):
    vocabulary = json.loads((base_model / "config.json").read_text())["vocab_size"]
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_labels=1, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path)
    judge = tmp_path / "judge.toml"
    judge.write_text(f'kind = "model"\npath = "{tmp_path}"\ndevice = "cuda"\n')
    trust(judge)

    async def scored():
        ((worker, _),) = (await built(("reward",), base_model, f"reward.function={judge}")).values()
        rows = await put_rows(plane)
        await worker.run("reward", StageCall(step=1, batch=rows))
        return (await plane.get(rows, ["scores"]))["scores"].values.tolist()

    with FakeGpu():
        assert asyncio.run(scored()) == [1.0] * len(KEYS), "what the fake GPU computes"


def test_a_tensor_left_on_the_cpu_is_an_error_on_the_fake_gpu():
    with FakeGpu() as gpu:
        there = torch.ones(3, device=GPU)
        assert isinstance(there, FakeTensor)
        with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
            there * torch.ones(3)
        assert torch.equal((there * torch.tensor(2.0)).cpu(), torch.ones(3))
        assert gpu.held == 12
        del there
        assert gpu.held == 0
