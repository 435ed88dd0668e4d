"""Models on another device than the CPU compute what they compute on the CPU.

The device is the only changed argument. Without a GPU it is a stand-in on which a tensor that was
left on the CPU is an error; with the marker `gpu` it is a real one.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from relative import near
from standin_device import STAND_IN, StandIn, StrayTensorError
from this_thread import ThisThread
from transformers import AutoModelForCausalLM, GemmaConfig, GPT2Config, Qwen2Config, Qwen2ForSequenceClassification

from rl_protocol import BatchData, RaggedColumn
from rl_protocol.ports import GenerationRequest, ImageInput, SamplingParams
from rl_protocol.torch import from_weight, to_weight
from rl_trainer.backends import reward_model, torch_policy
from rl_trainer.backends.parallel_strategy import PlainStrategy, full_tensors
from rl_trainer.backends.reward_model import RewardModelScorer
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.backends.world import CPU, compute_deterministically, device_of
from rl_trainer.config import ActorConfig, CriticConfig, OptimConfig, RolloutCorrectionConfig
from rl_trainer.config.backends import TorchConfig
from rl_trainer.config.lora import LoraConfig
from rl_trainer.rewards import Sample
from rl_trainer.rewards.scorer_toml import RewardModelConfig
from rl_trainer.rollout.hf_engine import HFRolloutEngine

pytestmark = pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter:UserWarning")

OPTIM = OptimConfig(lr=1e-2)
METRICS = 1e-4
"""Largest relative error of a metric; the first step of Adam at this rate multiplies rounding."""


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The other device."""
    if request.param == "stand-in":
        return STAND_IN
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return torch.device("cuda")


def on(device):
    """A context in which tensors of the device can be used."""
    return StandIn() if device == STAND_IN else nullcontext()


def policy_on(device, path, *, lora=None, packed=True, dtype="float32", sent_as="float32", sends=True, **settings):
    config = ActorConfig(optim=OPTIM, ppo_mini_batch_size=4, use_remove_padding=packed, **settings)
    strategy = PlainStrategy(TorchConfig(param_dtype=dtype), device)
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_rs=("token_k1",), rollout_rs_threshold=("0.1_8",))
    correction = correction if "use_kl_loss" in settings else None
    options = PolicyOptions(sum_pi_squared=True, correction=correction, sent_as=sent_as, sends=sends)
    return TorchPolicyBackend(path, config, lora=lora, strategy=strategy, options=options)


def critic_on(device, path, *, packed=True):
    config = CriticConfig(optim=OPTIM, ppo_mini_batch_size=4, use_remove_padding=packed)
    return TorchCriticBackend(path, config, rollout_n=1, seed=0, strategy=PlainStrategy(TorchConfig(), device))


@pytest.fixture(scope="module")
def data(model_path, training_batch):
    batch = training_batch(TorchPolicyBackend(model_path, None))
    offsets, rng = batch.ragged("responses").offsets, np.random.default_rng(1)
    more = {name: rng.normal(size=offsets[-1]).astype(np.float32) for name in ("values", "returns")}
    return BatchData({**batch.columns, **{name: RaggedColumn(x, offsets, "float32") for name, x in more.items()}})


def close(found, wanted, part=1e-4):
    """Whether arrays differ by at most that part of the largest number."""
    assert found.shape == wanted.shape
    return np.abs(found - wanted).max() <= part * np.abs(wanted).max()


def log_probs(policy, data):
    return policy.compute_log_probs(data, temperature=0.9).ragged("log_probs").values


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, dropout=0.0)], ids=["full", "lora"])
def test_a_policy_trains_as_on_the_cpu(model_path, data, device, lora, packed):
    def trained(device):
        policy = policy_on(device, model_path, lora=lora, packed=packed, use_kl_loss=True)
        columns = policy.compute_log_probs(data, temperature=0.9)
        if lora is not None:
            columns = columns.union(
                BatchData({"ref": policy.compute_reference_log_probs(data, temperature=0.9)["log_probs"]})
            )
        metrics = [policy.update(data, temperature=0.9) for _ in range(2)]
        weights = {weight.name: (weight.dtype, weight.shape) for weight in policy.named_weights()}
        return columns, metrics, log_probs(policy, data), weights

    wanted = trained(CPU)
    with on(device):
        found = trained(device)
    for name in wanted[0].columns:
        assert close(found[0].ragged(name).values, wanted[0].ragged(name).values), name
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        assert ours == near(theirs, METRICS, data)
    assert close(found[2], wanted[2], 1e-3)
    assert found[3] == wanted[3]
    assert not close(found[2], found[0].ragged("log_probs").values, 1e-2), "training changed nothing"


def test_the_state_of_adamw_is_in_host_memory_between_updates(model_path, data, device):
    def trained(offload):
        strategy = PlainStrategy(TorchConfig(optimizer_offload=offload), device)
        policy = TorchPolicyBackend(model_path, ActorConfig(optim=OPTIM, ppo_mini_batch_size=4), strategy=strategy)
        places = set[str]()
        for _ in range(2):
            policy.update(data, temperature=0.9)
            moments = policy._trained().moments()
            places |= {tensor.device.type for tensor in moments.values()}
            assert len(moments) > 10
            assert all((weight.grad is None) == offload for weight in policy._model.parameters())
        return places, log_probs(policy, data)

    with on(device):
        kept, offloaded = trained(offload=False), trained(offload=True)
    assert (kept[0], offloaded[0]) == ({device.type}, {"cpu"})
    assert np.array_equal(kept[1], offloaded[1])


def test_the_state_of_adamw_is_restored_into_host_memory(model_path, data, device, tmp_path):
    """Where replicas share the GPUs, a resumed run generates before its first update."""
    strategy = PlainStrategy(TorchConfig(optimizer_offload=True), device)
    config = ActorConfig(optim=OPTIM, ppo_mini_batch_size=4)
    with on(device):
        saved, resumed = (TorchPolicyBackend(model_path, config, strategy=strategy) for _ in range(2))
        saved.update(data, temperature=0.9)
        saved.snapshot()(tmp_path)
        resumed.restore(tmp_path)
        assert {tensor.device for tensor in resumed._trained().moments().values()} == {CPU}
        assert resumed.state_digest() == saved.state_digest()


def test_a_policy_in_bfloat16_trains(model_path, data, device):
    with on(device):
        policy = policy_on(device, model_path, dtype="bfloat16")
        before = log_probs(policy, data)
        metrics = policy.update(data, temperature=1.0)
        assert metrics["actor/grad_norm"] > 0
        assert metrics["actor/skipped_steps"] == 0
        assert not np.array_equal(log_probs(policy, data), before)
        assert {weight.dtype for weight in policy.named_weights()} == {"float32"}


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_cast_before_they_leave_their_device(model_path, device, monkeypatch, lora, dtype):
    left = []

    def leaves(name, tensor):
        left.append((tensor.dtype, tensor.device.type))
        return to_weight(name, tensor)

    whole = list(policy_on(CPU, model_path, lora=lora, dtype=dtype).named_weights())
    monkeypatch.setattr(torch_policy, "to_weight", leaves)
    with on(device):
        sent = list(policy_on(device, model_path, lora=lora, dtype=dtype, sent_as="bfloat16").named_weights())
    assert set(left) == {(torch.bfloat16, device.type)}
    assert {weight.dtype for weight in whole} == {"float32"}
    for ours, wanted in zip(sent, (from_weight(weight).bfloat16() for weight in whole), strict=True):
        assert torch.equal(from_weight(ours), wanted), ours.name


def test_a_rank_whose_weights_another_one_sends_copies_none_to_the_host(model_path, device, monkeypatch):
    gathered = []

    def gathering(items):
        for item in full_tensors(items):
            gathered.append(item[0])
            yield item

    adapted = policy_on(CPU, model_path, lora=LoraConfig(rank=2))
    names = [[one.name for one in weights()] for weights in (adapted.named_weights, adapted.adapter_weights)]
    monkeypatch.setattr(torch_policy, "full_tensors", gathering)
    monkeypatch.delattr(torch_policy, "to_weight")
    with on(device):
        policy = policy_on(device, model_path, lora=LoraConfig(rank=2), sends=False)
        for weights, wanted in zip((policy.named_weights, policy.adapter_weights), names, strict=True):
            assert list(weights()) == []
            assert len(gathered) == len(wanted), "it takes part to the end"
            gathered.clear()


def test_a_critic_trains_as_on_the_cpu(model_path, data, device):
    def trained(device, packed):
        critic = critic_on(device, model_path, packed=packed)
        metrics = [critic.update(data) for _ in range(2)]
        return metrics, critic.compute_values(data).ragged("values").values

    for packed in (True, False):
        wanted = trained(CPU, packed)
        with on(device):
            found = trained(device, packed)
        for ours, theirs in zip(found[0], wanted[0], strict=True):
            assert ours == near(theirs, METRICS, data)
        assert close(found[1], wanted[1], 1e-3)


def test_a_frozen_policy_computes_as_on_the_cpu(model_path, data, device):
    wanted = log_probs(TorchPolicyBackend(model_path, None), data)
    with on(device):
        options = PolicyOptions(frozen=True, forward_rows=3)
        reference = TorchPolicyBackend(model_path, None, strategy=PlainStrategy(TorchConfig(), device), options=options)
        assert close(log_probs(reference, data), wanted)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_checkpoints_are_read_on_either_device(model_path, data, device, tmp_path, lora):
    """What one device saves continues on the other; what it exports is a model like any other."""
    with on(device):
        saved = policy_on(device, model_path, lora=lora)
        saved.update(data, temperature=1.0)
        for folder, write in (("state", saved.snapshot()), ("model", saved.export())):
            (tmp_path / folder).mkdir()
            write(tmp_path / folder)
        wanted, then = log_probs(saved, data), saved.update(data, temperature=1.0)
    resumed = policy_on(CPU, model_path, lora=lora)
    resumed.restore(tmp_path / "state")
    assert close(log_probs(resumed, data), wanted)
    if lora is None:
        exported = TorchPolicyBackend(tmp_path / "model", None)
        assert close(log_probs(exported, data), wanted)
    assert resumed.update(data, temperature=1.0) == near(then, METRICS, data)
    (tmp_path / "back").mkdir()
    resumed.snapshot()(tmp_path / "back")
    with on(device):
        back = policy_on(device, model_path, lora=lora)
        back.restore(tmp_path / "back")
        assert close(log_probs(back, data), log_probs(resumed, data))


REQUESTS = [GenerationRequest(uid=f"p{i}", session=0, prompt_ids=(2 + i % 5,) * (1 + i % 4)) for i in range(70)]


def generate(engine, **params):
    """The responses and their log-probs, [requests, tokens]."""
    made = asyncio.run(engine.generate(REQUESTS, SamplingParams(**{"max_new_tokens": 6, **params})))
    return [g.response_ids for g in made], np.concatenate([g.log_probs for g in made])


def same(ours, theirs):
    return ours[0] == theirs[0] and close(ours[1], theirs[1])


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.0}, {"top_k": 3, "temperature": 0.7}, {"top_p": 0.8}, {"ignore_eos": True}],
    ids=["sampled", "greedy", "top_k", "top_p", "ignore_eos"],
)
def test_a_rollout_generates_as_on_the_cpu(model_path, device, params):
    wanted = generate(HFRolloutEngine(model_path), **params)
    assert params or len(set(map(len, wanted[0]))) > 2, "rows leave the batch at different times"
    with on(device):
        engine = HFRolloutEngine(model_path, device=device)
        assert not engine.capabilities.adopts, "it can't generate with memory of the host"
        assert same(generate(engine, **params), wanted)


@pytest.mark.parametrize("family", [GemmaConfig, GPT2Config])
def test_a_rollout_of_a_family_without_its_own_decoder_generates_as_on_the_cpu(tmp_path, device, family):
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 14}
    more = {"intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 8} if family is GemmaConfig else {}
    config = family(**small, **more, pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    wanted = generate(HFRolloutEngine(tmp_path))
    with on(device):
        assert same(generate(HFRolloutEngine(tmp_path, device=device)), wanted)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("trained_there", [True, False], ids=["trained there", "trained on the CPU"])
def test_a_rollout_takes_weights_from_either_device(model_path, data, device, lora, trained_there):
    with on(device):
        policy = policy_on(device if trained_there else CPU, model_path, lora=lora)
        policy.update(data, temperature=1.0)
        whole = list(policy.named_weights())
        engine, expected = HFRolloutEngine(model_path, device=device, lora=lora), HFRolloutEngine(model_path)
        before = generate(engine)
        expected.load_weights(whole, 1)
        if lora is None:
            engine.load_weights(whole, 1)
        else:
            engine.load_adapter(policy.adapter_weights(), 1)
        assert same(generate(engine), generate(expected))
        assert generate(engine)[0] != before[0]


def test_a_rollout_shares_the_base_of_a_policy_with_adapters_on_its_device(model_path, data, device):
    lora = LoraConfig(rank=2)
    with on(device):
        policy = policy_on(device, model_path, lora=lora)
        sharing, copying = (HFRolloutEngine(model_path, device=device, lora=lora) for _ in range(2))
        sharing.share_base(policy.base_weights())
        policy.update(data, temperature=1.0)
        for engine in (sharing, copying):
            engine.load_adapter(policy.adapter_weights(), 1)
        assert same(generate(sharing), generate(copying))


def test_a_policy_and_a_rollout_that_see_images_compute_as_on_the_cpu(make_vision_model, device):
    path = make_vision_model("qwen2_vl")
    rng = np.random.default_rng(0)
    image = ImageInput(pixel_values=rng.normal(size=(16, 96)).astype(np.float32), grid_thw=(1, 4, 4))
    asked = [GenerationRequest(uid="a", session=s, prompt_ids=(2, 3, 3, 3, 3, 4, 9), images=(image,)) for s in range(3)]
    asked.append(GenerationRequest(uid="b", session=0, prompt_ids=(9, 10)))
    sampling = SamplingParams(max_new_tokens=5, ignore_eos=True)
    wanted = asyncio.run(HFRolloutEngine(path).generate(asked, sampling))
    with on(device):
        found = asyncio.run(HFRolloutEngine(path, device=device).generate(asked, sampling))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.response_ids == theirs.response_ids
        assert ours.log_probs == pytest.approx(theirs.log_probs, rel=1e-4)


def test_a_reward_model_scores_as_on_the_cpu(tmp_path, device, monkeypatch):
    config = Qwen2Config(
        vocab_size=14, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
        num_key_value_heads=1, initializer_range=0.3, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path)
    texts = [[5, 6, 7], [2], [9, 3, 4, 8, 11, 1]]
    asked = [Sample(data_source="s", solution_str="", ground_truth="", tokens=tokens) for tokens in texts]

    def scored(device):
        scorer = RewardModelScorer(RewardModelConfig(path=str(tmp_path), device=str(device)))
        return np.array([one.numbers["score"] for one in asyncio.run(scorer.score(asked))])

    wanted = scored(CPU)
    monkeypatch.setattr(reward_model, "ThreadPoolExecutor", ThisThread)
    with on(device):
        assert close(scored(device), wanted)


def test_a_tensor_left_on_the_cpu_is_an_error_on_the_stand_in():
    with StandIn() as device:
        there = torch.ones(3, device=STAND_IN)
        with pytest.raises(StrayTensorError, match=r"aten.mul.Tensor .* shapes \[\(3,\)\]"):
            there * torch.ones(3)
        assert torch.equal((there * torch.tensor(2.0)).cpu(), torch.full((3,), 2.0))
    assert device.host_reads == {("elsewhere", "copy", "")}


def test_only_a_gpu_is_asked_for_deterministic_algorithms(monkeypatch):
    """On the CPU they are so by default, and the setting would clear all new memory."""
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # what the code sets is then undone
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    for found in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        compute_deterministically()
        assert asked == [True] * found
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == found


def test_prefix_sums_of_samples_are_exempt_from_deterministic_algorithms(model_path, monkeypatch):
    """Torch has none for them on a GPU, and raises there."""
    strict, cumsum = [], torch.Tensor.cumsum

    def noting(numbers, *arguments, **options):
        if numbers.is_floating_point():
            strict.append(torch.are_deterministic_algorithms_enabled())
        return cumsum(numbers, *arguments, **options)

    engine = HFRolloutEngine(model_path)
    wanted = generate(engine, top_p=0.8)
    monkeypatch.setattr(torch.Tensor, "cumsum", noting)
    torch.use_deterministic_algorithms(True)
    try:
        assert same(generate(engine, top_p=0.8), wanted)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert strict
    assert not any(strict)


def test_auto_is_the_cpu_where_the_process_has_no_gpu(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_of("auto") == device_of("cpu") == CPU
    assert not caplog.records
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert device_of("auto") == CPU
    assert "was given GPU 3, but torch" in caplog.text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of("auto") == torch.device("cuda")
