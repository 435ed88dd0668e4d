"""Router replay: recorded and given experts, against a mixture of experts written out here."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from relative import apart
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from rl_protocol import BatchData, BatchError, ConfigError, pack_arrays, ragged
from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_protocol.rl_columns import ROUTED, ROUTED_COLUMNS
from rl_trainer import ActorConfig, OptimConfig
from rl_trainer.backends.experts.routing import ExpertRouting
from rl_trainer.backends.loading import load_model
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.data.model_families import ROUTED_FAMILIES, RoutedLayers
from rl_trainer.rollout.hf_engine import HFRolloutEngine

pytestmark = pytest.mark.numeric

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
CONFIGS = {
    "mixtral": MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SIZES),
    "olmoe": OlmoeConfig(num_experts=4, num_experts_per_tok=2, norm_topk_prob=False, **SIZES),
    "qwen2_moe": Qwen2MoeConfig(**EXPERTS, shared_expert_intermediate_size=12, norm_topk_prob=False, **SIZES),
    "qwen3_moe": Qwen3MoeConfig(**EXPERTS, head_dim=8, norm_topk_prob=True, **SIZES),
}
REQUESTS = [GenerationRequest(uid=f"p{i // 2}", session=i % 2, prompt_ids=(2 + i // 2,) * 9) for i in range(8)]
REQUESTS += [GenerationRequest(uid="q", session=0, prompt_ids=(3, 4))]


def made(family):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIGS[family]).eval()


def test_every_family_is_tested():
    assert CONFIGS.keys() == ROUTED_FAMILIES.keys()


@pytest.mark.parametrize("family", ROUTED_FAMILIES)
def test_the_experts_of_a_pass_replayed_give_its_logits_and_gradients_bit_for_bit(family):
    model, ids = made(family), torch.arange(2, 14).view(2, 6)
    routing = ExpertRouting(model)
    described = RoutedLayers.of(model.config.to_dict())
    assert (routing.layers, routing.top_k) == (described.layers, described.top_k) == (2, 2)
    with routing.recording() as chosen:
        plain = model(ids).logits
    plain.square().sum().backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    assert any("gate.weight" in name and gradient.any() for name, gradient in gradients.items())
    model.zero_grad()
    routing.replay(torch.stack(chosen, 1))
    replayed = model(ids).logits
    assert replayed.equal(plain)
    replayed.square().sum().backward()
    assert all(weight.grad.equal(gradients[name]) for name, weight in model.named_parameters() if name in gradients)
    routing.replay(torch.full((12, 2, 2), -1))
    assert model(ids).logits.equal(plain)


def experts_by_hand(block, hidden, given, *, normalized):
    """One layer of experts [tokens, H] over the given experts [tokens, K], token by token."""
    out = []
    for state, ids in zip(hidden, given, strict=True):
        logits = block.gate.weight @ state
        weights = torch.exp(logits) / torch.exp(logits).sum()
        weights = weights[ids] / (weights[ids].sum() if normalized else 1)
        total = torch.zeros_like(state)
        for expert, weight in zip(ids.tolist(), weights, strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ state).chunk(2)
            total = total + weight * (block.experts.down_proj[expert] @ (F.silu(gate) * up))
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe"])
def test_forced_experts_compute_what_they_do_by_hand(family):
    """Forward, and the gradients of router, experts and input, at experts that no router chose."""
    model = made(family)
    routing, block = ExpertRouting(model), model.model.layers[1].mlp
    hidden = torch.linspace(-1, 1, 5 * 16).view(1, 5, 16).requires_grad_()
    given = torch.tensor([[3, 0], [1, 2], [2, 1], [0, 3], [3, 1]])
    routing.replay(torch.stack([given.flip(0), given], 1))
    forced = block(hidden)[0]
    by_hand = experts_by_hand(block, hidden[0], given, normalized=family != "olmoe")
    assert apart(forced, by_hand) < 1e-5
    inputs = [hidden, block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
    want = torch.autograd.grad(by_hand.square().sum(), inputs)
    for got, expected in zip(torch.autograd.grad(forced.square().sum(), inputs), want, strict=True):
        assert (got - expected).norm() < 1e-4 * expected.norm()
    routing.replay(None)
    assert not block(hidden)[0].allclose(forced)


def test_a_model_without_experts_is_refused(model_path):
    with pytest.raises(ConfigError, match=r"needs a model with experts .* got .*ForCausalLM"):
        ExpertRouting(load_model(model_path))


# -- the rollout records, the policy replays


@pytest.fixture(scope="module")
def moved(moe_model, tmp_path_factory):
    """The model with other routers, as if its weights had moved after the rollout."""
    model = load_model(moe_model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for layer in model.model.layers:
            layer.mlp.gate.weight.add_(0.01 * torch.randn_like(layer.mlp.gate.weight))
    folder = tmp_path_factory.mktemp("moved")
    model.save_pretrained(folder)
    return folder


def generate(folder, requests=REQUESTS, **params):
    engine = HFRolloutEngine(folder, max_batch_size=5)
    params = {"max_new_tokens": 12, "routed_experts": True, **params}
    return asyncio.run(engine.generate(requests, SamplingParams(**params)))


def batch_of(requests, generations, *, routed=True):
    columns = {
        "prompts": ragged([r.prompt_ids for r in requests], "int64"),
        "responses": ragged([g.response_ids for g in generations], "int64"),
    }
    if routed:
        columns |= pack_arrays(ROUTED, [[g.routed] for g in generations], ndim=3, dtype="int16")
    return BatchData(columns)


def policy_of(folder, *, packed=False, records=False):
    config = ActorConfig(use_remove_padding=packed, optim=OptimConfig(lr=1e-2, lr_warmup_steps=0))
    return TorchPolicyBackend(folder, config, options=PolicyOptions(replays_experts=True, records_experts=records))


def log_probs(policy, batch):
    return policy.compute_log_probs(batch, temperature=1.0).ragged("log_probs").values


def test_the_rollout_records_the_experts_of_every_token_with_a_forward_pass(moe_model):
    """As the model alone chooses them, for responses of different lengths."""
    model = AutoModelForCausalLM.from_pretrained(moe_model)
    generations = generate(moe_model)
    assert len({len(one.response_ids) for one in generations}) > 1
    for request, one in zip(REQUESTS, generations, strict=True):
        ids = [*request.prompt_ids, *one.response_ids][:-1]
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
        top = torch.stack([layer.topk(2).indices for layer in logits], 1)
        assert one.routed.dtype == np.int16
        assert one.routed.tolist() == top.tolist()


def test_recording_does_not_change_what_is_sampled(moe_model):
    plain = generate(moe_model, routed_experts=False)
    assert all(one.routed is None for one in plain)
    recorded = generate(moe_model)
    assert [one.response_ids for one in plain] == [one.response_ids for one in recorded]
    assert [one.log_probs for one in plain] == [one.log_probs for one in recorded]


@pytest.mark.parametrize("packed", [False, True])
def test_at_equal_weights_replayed_log_probs_are_the_plain_ones(moe_model, packed):
    generations, policy = generate(moe_model), policy_of(moe_model, packed=packed)
    replayed = log_probs(policy, batch_of(REQUESTS, generations))
    assert replayed.tolist() == log_probs(policy, batch_of(REQUESTS, generations, routed=False)).tolist()
    sampled = np.concatenate([one.log_probs for one in generations])
    assert apart(replayed, sampled) < 1e-5


@pytest.mark.parametrize("packed", [False, True])
def test_with_moved_routers_only_replay_keeps_the_experts(moe_model, moved, packed):
    """Log-probs of the trainer against those of an engine with other routers."""
    generations, policy = generate(moe_model), policy_of(moved, packed=packed, records=True)
    sampled = np.concatenate([one.log_probs for one in generations])
    plain = policy.compute_log_probs(batch_of(REQUESTS, generations, routed=False), temperature=1.0)
    want = batch_of(REQUESTS, generations).ragged(ROUTED).values
    assert (plain.ragged(ROUTED).values != want).any()
    replayed = policy.compute_log_probs(batch_of(REQUESTS, generations), temperature=1.0)
    assert replayed.ragged(ROUTED).values.tolist() == want.tolist()
    gap, without = (np.abs(one.ragged("log_probs").values - sampled) for one in (replayed, plain))
    assert without.max() > 3 * gap.max()


def test_prompts_with_different_experts_are_not_shared(moe_model):
    """Two rows of a prompt, of which the second has other experts."""
    requests, policy = REQUESTS[:2], policy_of(moe_model, packed=True)
    generations = generate(moe_model, requests, ignore_eos=True)
    batch = batch_of(requests, generations)
    changed = [generations[0].routed, (generations[1].routed + 1) % 4]
    batch = BatchData({**batch.columns, **pack_arrays(ROUTED, [[one] for one in changed], ndim=3, dtype="int16")})
    both = log_probs(policy, batch).tolist()
    alone = [value for row in range(2) for value in log_probs(policy, batch.select_rows([row])).tolist()]
    assert apart(both, alone) < 1e-5
    assert apart(both[12:], log_probs(policy, batch_of(requests, generations))[12:]) > 1e-2


@pytest.mark.parametrize("packed", [False, True])
def test_the_update_replays_what_the_pass_before_it_recorded(moe_model, moved, packed):
    """R2: at the first optimizer step the ratio of every token is 1, with the experts given."""
    generations = generate(moe_model)
    policy = policy_of(moved, packed=packed, records=True)
    batch = batch_of(REQUESTS, generations, routed=False)
    before = policy.compute_log_probs(batch, temperature=1.0)
    again = log_probs(policy, BatchData({**batch.columns, **{name: before[name] for name in ROUTED_COLUMNS}}))
    assert again.tolist() == before.ragged("log_probs").values.tolist()
    tokens = len(again)
    lengths = batch.ragged("responses").lengths
    full = {
        **batch.columns,
        **{name: before[name] for name in ROUTED_COLUMNS},
        "response_mask": ragged([[True] * n for n in lengths], "bool"),
        "old_log_probs": before["log_probs"],
        "advantages": ragged([[1.0] * n for n in lengths], "float32"),
    }
    metrics = policy.update(BatchData(full), temperature=1.0)
    assert tokens > 20
    assert apart(metrics["actor/ppo_kl"], 0.0, again) < 1e-6
    routed = policy.compute_log_probs(BatchData({**batch.columns}), temperature=1.0).ragged(ROUTED).values
    assert (routed != before.ragged(ROUTED).values).any()  # the routers have moved


def test_rows_without_experts_beside_others_are_routed_by_the_model(moe_model, moved):
    generations, policy = generate(moe_model), policy_of(moved)
    none = [[np.zeros((len(one.routed), 0, 0), np.int16)] for one in generations[:4]]
    batch = batch_of(REQUESTS, generations)
    mixed = pack_arrays(ROUTED, [*none, *([one.routed] for one in generations[4:])], ndim=3, dtype="int16")
    got = log_probs(policy, BatchData({**batch.columns, **mixed}))
    first = batch.ragged("responses").offsets[4]
    plain = log_probs(policy, batch_of(REQUESTS, generations, routed=False))
    assert apart(got[:first], plain[:first]) < 1e-5
    assert apart(got[first:], log_probs(policy, batch)[first:]) < 1e-5


def test_experts_of_another_number_of_tokens_are_refused(moe_model):
    generations = generate(moe_model, REQUESTS[:2])
    batch = batch_of(REQUESTS[:2], generations)
    short = pack_arrays(ROUTED, [[one.routed[1:]] for one in generations], ndim=3, dtype="int16")
    with pytest.raises(
        BatchError, match=r"Row 0 has .* tokens of prompt and response with a forward pass, and experts of"
    ):
        log_probs(policy_of(moe_model), BatchData({**batch.columns, **short}))
