"""A teacher whose weights are the moving average of the policy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_protocol import BatchData, ConfigError, ragged
from rl_protocol.torch import from_weight
from rl_trainer import ActorConfig, FsdpConfig, LoraConfig, OptimConfig
from rl_trainer.backends.optimizer import MovingAverage
from rl_trainer.backends.parallel_strategy import FsdpStrategy
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.backends.world import World

pytestmark = pytest.mark.numeric
DECAY = 0.75
PROMPTS, RESPONSES = [[2, 3], [4], [5, 6, 7]], [[8, 1], [9, 9, 9], [3]]
CONFIG = ActorConfig(optim=OptimConfig(lr=1e-2), ppo_mini_batch_size=3)


def policy(path, **more):
    return TorchPolicyBackend(path, CONFIG, options=PolicyOptions(teacher_ema=DECAY), **more)


def batch(seed):
    rng = np.random.default_rng(seed)
    shape = [[float(rng.normal()) for _ in row] for row in RESPONSES]
    return BatchData(
        {
            "prompts": ragged(PROMPTS, "int64"),
            "responses": ragged(RESPONSES, "int64"),
            "response_mask": ragged([[True] * len(row) for row in RESPONSES], "bool"),
            "old_log_probs": ragged([[-2.0] * len(row) for row in RESPONSES], "float32"),
            "advantages": ragged(shape, "float32"),
        }
    )


def weights(backend):
    """Whole weights, with adapters merged in, in float64."""
    return {one.name: from_weight(one).double().clone() for one in backend.named_weights()}


def test_the_average_of_a_weight_by_hand():
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(8.0)
    average = MovingAverage(model, 0.75)
    for value in (4.0, 0.0):
        with torch.no_grad():
            model.weight.fill_(value)
        average.update()  # 0.75 * 8 + 0.25 * 4 = 7, and 0.75 * 7 = 5.25
    with average.applied():
        assert model.weight.item() == 5.25
    assert model.weight.item() == 0.0
    assert average.tensors["weight"].item() == 5.25
    with pytest.raises(RuntimeError), average.applied():
        raise RuntimeError
    assert model.weight.item() == 0.0


def test_the_teacher_scores_with_the_average_and_the_policy_stays_itself(model_path):
    """Against transformers with weights that are averaged here in float64."""
    backend = policy(model_path)
    average = weights(backend)
    for step in range(3):
        backend.update(batch(step), temperature=1.0)
        now = weights(backend)
        average = {name: DECAY * average[name] + (1 - DECAY) * now[name] for name in now}
    own = backend.compute_log_probs(batch(0), temperature=1.0).ragged("log_probs").values
    found = backend.compute_teacher_log_probs(batch(0), temperature=1.0).ragged("log_probs").rows()
    assert all(torch.equal(now[name], tensor) for name, tensor in weights(backend).items())
    assert np.array_equal(backend.compute_log_probs(batch(0), temperature=1.0).ragged("log_probs").values, own)
    model = AutoModelForCausalLM.from_pretrained(model_path).double()
    model.load_state_dict(average, strict=False)
    for prompt, response, log_probs in zip(PROMPTS, RESPONSES, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        want = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
        assert log_probs.tolist() == pytest.approx(want.tolist(), rel=1e-4)
    assert np.abs(np.concatenate(list(found)) - own).max() > 1e-2, "the teacher differs from the policy"


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_a_resumed_run_has_the_teacher_of_one_that_went_on(model_path, tmp_path, lora):
    straight, resumed = (policy(model_path, lora=lora) for _ in range(2))
    straight.update(batch(0), temperature=1.0)
    straight.snapshot()(tmp_path)
    resumed.restore(tmp_path)
    assert resumed.state_digest() == straight.state_digest()
    for backend in (straight, resumed):
        backend.update(batch(1), temperature=1.0)
    found, want = (
        one.compute_teacher_log_probs(batch(0), temperature=1.0).ragged("log_probs").values
        for one in (resumed, straight)
    )
    assert np.array_equal(found, want)
    assert resumed.state_digest() == straight.state_digest()


def test_a_checkpoint_without_an_average_is_refused(model_path, tmp_path):
    plain = TorchPolicyBackend(model_path, CONFIG)
    plain.snapshot()(tmp_path)
    with pytest.raises(ConfigError, match="average/"):
        policy(model_path).restore(tmp_path)


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield World()
    torch.distributed.destroy_process_group()


def test_with_gathered_weights_that_stay_the_teacher_and_the_policy_are_those_of_one_process(model_path, one_rank):
    """A pass without gradients leaves the weights gathered; the average must not be hidden by them,
    nor stay in them."""
    kept = FsdpStrategy(FsdpConfig(device="cpu", reshard_after_forward=False), one_rank)
    backends = policy(model_path), policy(model_path, strategy=kept)
    found = []
    for backend in backends:
        rows = []
        for step in range(3):
            for compute in (backend.compute_log_probs, backend.compute_teacher_log_probs):
                rows.append(compute(batch(0), temperature=1.0).ragged("log_probs").values)
            backend.update(batch(step), temperature=1.0)
        found.append(np.stack(rows))
    assert np.abs(found[0] - found[1]).max() < 1e-3
    assert np.abs(found[0][-1] - found[0][-2]).max() > 1e-2, "the teacher differs from the policy"


def test_a_checkpoint_after_a_pass_has_the_weights_that_stay_gathered(model_path, tmp_path, one_rank):
    strategy = FsdpStrategy(FsdpConfig(device="cpu", reshard_after_forward=False), one_rank)
    backend = policy(model_path, strategy=strategy)
    backend.update(batch(0), temperature=1.0)
    digest, before = backend.state_digest(), weights(backend)
    log_probs = backend.compute_log_probs(batch(0), temperature=1.0).ragged("log_probs").values
    backend.snapshot()(tmp_path)
    assert backend.state_digest() == digest
    fresh = policy(model_path)
    fresh.restore(tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(fresh).items())
    assert np.array_equal(backend.compute_log_probs(batch(0), temperature=1.0).ragged("log_probs").values, log_probs)
