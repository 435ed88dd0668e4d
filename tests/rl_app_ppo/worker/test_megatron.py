"""The app's policy and critic on Megatron-Core match plain torch: losses, gradients, weights."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
from relative import apart, near

from rl_app_ppo.config.loading import load_config
from rl_protocol import BatchData, ragged
from rl_protocol.support.rendezvous import Rendezvous
from rl_transferqueue import TransferQueueConfig, connect_blocking, start_local_plane

pytestmark = [  # as in tests/rl_megatron_peft/conftest.py
    pytest.mark.filterwarnings("ignore:.*not installed"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def model(tmp_path):
    """A Llama model, because it has no key biases.

    The gradient of a key bias is only rounding error, which Adam scales up.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, **ends, initializer_range=0.3)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def alone():
    """A function that joins a process group of one rank, which is left afterwards."""
    import torch.distributed as dist

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # import warnings of Megatron-Core and its dependencies
        from rl_app_ppo.worker.megatron import join_ranks
        from rl_megatron_peft.backend.parallel import close_ranks
    yield lambda config: join_ranks(config, Rendezvous())
    close_ranks()
    dist.destroy_process_group()


def trajectories():
    """Return 16 ragged trajectories."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, 9, 16)
    columns = {
        "prompts": ragged([rng.integers(2, 16, 3).tolist() for _ in lengths], "int64"),
        "responses": ragged([rng.integers(1, 16, n).tolist() for n in lengths], "int64"),
        "response_mask": ragged([(rng.random(n) < 0.9).tolist() for n in lengths], "bool"),
        "advantages": ragged([rng.normal(size=n).tolist() for n in lengths], "float32"),
        "returns": ragged([rng.normal(size=n).tolist() for n in lengths], "float32"),
    }
    return BatchData(columns)


def moved(column, scale):
    """Return a copy of a ragged column with small random changes."""
    rng = np.random.default_rng(2)
    return ragged([(row + rng.normal(scale=scale, size=len(row))).tolist() for row in column.rows()], "float32")


SMALL = ["model_engine=megatron", "data.train_batch_size=8", "actor.ppo_mini_batch_size=4", "rollout.n=2"]
CUT_BY_ROWS = "actor.ppo_micro_batch_size=3"
TRAINED = [*SMALL, CUT_BY_ROWS, "actor.use_kl_loss=false"]


def measured_by(policy):
    """Return trajectories whose old log-probs differ a little from the policy's."""
    batch = trajectories()
    before = policy.compute_log_probs(batch, temperature=0.9).ragged("log_probs")
    return BatchData({**batch.columns, "old_log_probs": moved(before, 0.2)})


def updated_alike(ours, theirs, batch):
    """Update both policies on a batch; return the metrics, which must agree."""
    one, other = (policy.update(batch, temperature=0.9) for policy in (ours, theirs))
    assert {name: one[name] for name in other} == near(other, 1e-4, batch)
    return other


def assert_same_weights(ours, theirs):
    weights = {weight.name: weight.data.view("float32") for weight in theirs.named_weights()}
    for weight in ours.named_weights():
        assert apart(weight.data.view("float32"), weights.pop(weight.name)) < 1e-4
    assert not weights


@pytest.mark.parametrize("cut", [CUT_BY_ROWS, "actor.ppo_max_token_len=24"])
def test_all_weights_are_trained_as_on_plain_torch(model, alone, cut):
    from rl_app_ppo.worker.megatron import megatron_policy
    from rl_trainer.backends.torch_policy import TorchPolicyBackend

    config = load_config([*SMALL, cut, "actor.use_kl_loss=false", "actor.optim.lr=1e-3"])
    ours = megatron_policy(config, model, alone(config))
    theirs = TorchPolicyBackend(model, config.actor, rollout_n=config.rollout.n, seed=config.trainer.seed)
    batch = measured_by(theirs)
    for _ in range(2):
        metrics = updated_alike(ours, theirs, batch)
    assert metrics["actor/pg_clipfrac"] > 0
    assert_same_weights(ours, theirs)


def test_interpolated_log_probs_train_as_on_plain_torch(model, alone):
    """Half-way between the policy and the rollout's log-probs, with weights up to 1.1."""
    from rl_app_ppo.worker.megatron import megatron_policy
    from rl_trainer.algorithms.old_log_prob import loss_correction
    from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend

    asked = ["async_rl.max_staleness=2", "algorithm.old_log_prob=interpolate", "rollout.num_workers=1"]
    limit = "algorithm.rollout_correction.rollout_is_threshold=1.1"
    config = load_config([*TRAINED, "actor.optim.lr=1e-3", *asked, limit])
    ours = megatron_policy(config, model, alone(config))
    options = PolicyOptions(correction=loss_correction(config.algorithm))
    theirs = TorchPolicyBackend(
        model, config.actor, rollout_n=config.rollout.n, seed=config.trainer.seed, options=options
    )
    batch = measured_by(theirs)
    half = ragged([[0.5] * length for length in batch.ragged("responses").lengths], "float32")
    batch = batch.union(BatchData({"interpolation": half}))
    assert updated_alike(ours, theirs, batch)["rollout_corr/rollout_is_mean"] != 1
    assert_same_weights(ours, theirs)


def test_a_critic_learns_as_on_plain_torch(model, alone):
    from rl_app_ppo.worker.megatron import megatron_critic
    from rl_trainer.backends.torch_critic import TorchCriticBackend

    passes = ["critic.ppo_mini_batch_size=4", "critic.ppo_micro_batch_size=3"]
    config = load_config(["algorithm=ppo", *SMALL, *passes, "critic.optim.lr=1e-2", "critic.cliprange_value=0.1"])
    ours = megatron_critic(config, model, alone(config))
    theirs = TorchCriticBackend(model, config.critic, rollout_n=config.rollout.n, seed=config.trainer.seed)
    batch = trajectories()
    for _ in range(4):
        columns = {"values": moved(theirs.compute_values(batch).ragged("values"), 0.05)}
        batch = BatchData({**batch.columns, **columns})
        one, other = (critic.update(batch) for critic in (ours, theirs))
        assert one == near(other, 1e-4, batch)
        values = [critic.compute_values(batch).ragged("values").values for critic in (ours, theirs)]
        assert apart(*values) < 1e-3
    assert np.ptp(values[0]) > 0.1
    assert 0 < other["critic/vf_clipfrac"] < 1


@pytest.mark.parametrize("lora", [["lora.rank=2"], []], ids=["adapters", "all weights"])
def test_models_of_one_process_learn_what_each_learns_alone(model, alone, lora):
    """Policy, reference and critic take turns; they share the ranks and nothing else."""
    from rl_app_ppo.worker.megatron import megatron_critic, megatron_policy

    sizes = ["critic.ppo_mini_batch_size=4", "actor.optim.lr=1e-3", "critic.optim.lr=1e-3"]
    config = load_config(["algorithm=ppo", *TRAINED, *sizes, *lora])
    ranks = alone(config)
    single = megatron_policy(config, model, ranks)
    batch = measured_by(single)
    expected = [single.update(batch, temperature=0.9) for _ in range(2)]
    weights = {weight.name: weight.data.tobytes() for weight in single.named_weights()}
    critic, reference, policy = (
        make(config, model, ranks) for make in (megatron_critic, megatron_policy, megatron_policy)
    )
    initial = reference.compute_log_probs(batch, temperature=0.9).ragged("log_probs").values.tobytes()
    found = []
    for _ in range(2):
        values = critic.compute_values(batch).ragged("values")
        critic.update(BatchData({**batch.columns, "values": values}))
        found.append(policy.update(batch, temperature=0.9))
        assert reference.compute_log_probs(batch, temperature=0.9).ragged("log_probs").values.tobytes() == initial
    assert found == expected
    assert {weight.name: weight.data.tobytes() for weight in policy.named_weights()} == weights
    assert np.ptp(critic.compute_values(batch).ragged("values").values) > 0


def test_the_worker_of_the_reference_has_no_optimizer(model, alone, monkeypatch):
    from rl_app_ppo.worker import megatron
    from rl_app_ppo.worker.messages import BuildCall
    from rl_protocol import ConfigError
    from rl_protocol.testing.memory_data_plane import MemoryDataPlane
    from rl_trainer import step_columns

    config = load_config([*SMALL, "actor.use_kl_loss=true", "placement=separate"])
    ranks = alone(config)
    monkeypatch.setattr(megatron, "join_ranks", lambda *_: ranks)
    call = BuildCall(config="", model_path=str(model), plane=b"")
    columns = step_columns(config.algorithm, config.actor)
    build = megatron.build_megatron(config, call, MemoryDataPlane(), columns, Rendezvous())
    reference, actor = (build(role, None)[0] for role in ("ref", "actor"))
    assert len(actor._backend.optimizer.trained) == len(list(actor._backend.model.parameters()))
    with pytest.raises(ConfigError, match="built frozen, as a reference"):
        reference._backend.optimizer  # noqa: B018


@pytest.mark.parametrize(("role", "key"), [("actor", "lora"), ("critic", "critic")])
def test_an_adapter_that_can_not_be_read_is_named_with_its_key(model, alone, monkeypatch, tmp_path, role, key):
    from rl_app_ppo.worker import megatron
    from rl_app_ppo.worker.messages import BuildCall
    from rl_protocol import RLError
    from rl_protocol.testing.memory_data_plane import MemoryDataPlane
    from rl_trainer import step_columns

    adapters = "critic.use_lora=true", "lora.rank=2"
    config = load_config([*SMALL, "algorithm=ppo", "critic.ppo_mini_batch_size=4", *adapters])
    ranks = alone(config)
    monkeypatch.setattr(megatron, "join_ranks", lambda *_: ranks)
    gone = str(tmp_path / "gone")
    call = BuildCall(config="", model_path=str(model), plane=b"", adapter_path=gone, critic_adapter_path=gone)
    columns = step_columns(config.algorithm, config.actor)
    build = megatron.build_megatron(config, call, MemoryDataPlane(), columns, Rendezvous())
    with pytest.raises(RLError, match=rf"^{key}\.adapter_path: .*gone"):
        build(role, None)


@pytest.mark.parametrize("lora", [["lora.rank=2"], []], ids=["adapters", "all weights"])
def test_bfloat16_is_what_is_computed_in_and_float32_what_is_trained(model, alone, lora):
    import torch

    from rl_app_ppo.worker.megatron import megatron_policy
    from rl_ckpt_engine.endpoints.cast_dtype import cast

    config = load_config([*TRAINED, *lora, "actor.optim.lr=1e-2", "megatron.param_dtype=bfloat16"])
    policy = megatron_policy(config, model, alone(config))
    assert {p.dtype for name, p in policy.model.named_parameters() if ".adapter." not in name} == {torch.bfloat16}
    before = {weight.name: weight.data.tobytes() for weight in policy.named_weights()}
    policy.update(measured_by(policy), temperature=0.9)
    assert {t.dtype for _, parts in policy.optimizer.state() for t in parts.values()} == {torch.float32}
    sent = list(policy.named_weights())
    assert {weight.name for weight in sent if weight.data.tobytes() != before[weight.name]}
    # A float32 rollout gets whole weights in its own dtype: what the app sends is cast to float32
    # without loss.
    assert all(cast(cast(w, "float32"), "bfloat16").data.tobytes() == w.data.tobytes() for w in sent)


@pytest.mark.parametrize("kind", ["use_dora=false", "use_dora=true", "use_rslora=true"])
def test_a_rollout_makes_the_policys_weights_of_the_adapter_it_is_sent(model, alone, kind):
    """The adapter has the names, shapes and meaning that the transformers rollout expects."""
    from transformers import AutoModelForCausalLM

    from rl_app_ppo.worker.megatron import megatron_policy
    from rl_protocol.torch import from_weight
    from rl_trainer.backends.peft_lora import MergedAdapter

    config = load_config([*TRAINED, "lora.rank=2", f"lora.{kind}", "actor.optim.lr=1e-2"])
    rollout = MergedAdapter(AutoModelForCausalLM.from_pretrained(model), config.lora)
    policy = megatron_policy(config, model, alone(config))
    policy.update(measured_by(policy), temperature=0.9)
    sent = {weight.name: from_weight(weight) for weight in policy.adapter_weights()}
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == rollout.shapes()
    wanted = {weight.name: from_weight(weight).clone() for weight in policy.named_weights()}
    made = dict(rollout.weights(sent))
    assert len(made) == 14
    for name, weight in made.items():
        assert apart(weight, wanted[name]) < 1e-4


RANK = """
import asyncio, json, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import msgspec
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.worker.megatron import join_ranks, megatron_policy
from rl_protocol import KVBatchMeta
from rl_trainer import ActorWorker, step_columns
from rl_protocol.support.rendezvous import Rendezvous, RendezvousAddress, RendezvousListener
from rl_trainer.workers.messages import ReadAheadCall, StageCall
from rl_transferqueue import PlaneDescriptor, connect

rank, address, model, descriptor, keys, options = (json.loads(part) for part in sys.argv[1:])
listener = None if rank else RendezvousListener()
address = msgspec.convert(address, RendezvousAddress) if listener is None else listener.address
print(msgspec.json.encode(address).decode(), flush=True)
meeting = Rendezvous(rank=rank, size=2, address=address, listener=listener)
config = load_config(options)
calls = {"get": 0, "put": 0}

def counted(name, method):
    def call(*args, **kwargs):
        calls[name] += 1
        return method(*args, **kwargs)
    return call

async def main():
    plane = await connect(PlaneDescriptor.from_json(descriptor))
    plane.get, plane.put = counted("get", plane.get), counted("put", plane.put)
    policy = megatron_policy(config, Path(model), join_ranks(config, meeting))
    worker = ActorWorker(plane, step_columns(config.algorithm, config.actor), policy, 1.0)
    batch = KVBatchMeta(partition="train", keys=tuple(keys))
    for stage in ("old_log_prob", "update_actor"):
        await worker.read_ahead(ReadAheadCall(stage=stage, batch=batch))
        result = await worker.run(stage, StageCall(step=1, batch=batch))
    traffic = plane.traffic()
    print(json.dumps([calls, traffic.data_read, traffic.data_written, result.metrics]))
    await plane.close()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "cut", [pytest.param("tensor", marks=pytest.mark.slow), pytest.param("pipeline", marks=pytest.mark.nightly)]
)
def test_one_rank_of_a_replica_fetches_and_writes_for_all(model, cut):
    """Two stages read trajectories and prompts: four fetches, not four on each of two ranks."""
    options = [*TRAINED, f"megatron.{cut}_model_parallel_size=2"]
    rows = trajectories()
    keys = [f"p{row}/0/0" for row in range(len(rows))]
    with start_local_plane(TransferQueueConfig(capacity_mb=32, segment_mb=1)) as running:
        here = connect_blocking(running.descriptor)
        here.put("train/prompts", [key.partition("/")[0] for key in keys], rows.select_fields(["prompts"]))
        own = ["responses", "response_mask", "advantages"]
        here.put("train", keys, rows.select_fields(own))
        shared = [str(model), running.descriptor.to_json(), keys, options]
        ranks, address = list[subprocess.Popen[str]](), None
        for rank in range(2):
            words = [sys.executable, "-c", RANK, *map(json.dumps, [rank, address, *shared])]
            ranks.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
            assert ranks[-1].stdout is not None
            address = json.loads(ranks[-1].stdout.readline())
        try:
            said = [json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        names = here.list_rows("train", fields=["old_log_probs"])
        here.close()
    (leader, read, written, metrics), (other, *nothing, same) = said
    assert (leader, other) == ({"get": 4, "put": 1}, {"get": 0, "put": 0})
    assert read > 0
    assert written > 0
    assert nothing == [0, 0]
    assert metrics == same
    assert set(names.keys) == set(keys)
