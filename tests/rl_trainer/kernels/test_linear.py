"""Linear layers by oneDNN: their values and gradients, and where they are used."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from onednn import by_onednn
from policy_weights import weights_of
from relative import apart, near

from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_trainer import ActorConfig, OptimConfig
from rl_trainer.backends.parallel_strategy import PlainStrategy
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.config.backends import TorchConfig
from rl_trainer.kernels import linear as kernels
from rl_trainer.rollout.hf_engine import HFRolloutEngine

pytestmark = pytest.mark.numeric
EPSILON = torch.finfo(torch.float32).eps


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def onednn():
    """The shapes [M, N] of the products of oneDNN, which computes whatever the processor."""
    with by_onednn() as shapes:
        yield shapes


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "width", "outputs"), [((2, 40), 96, 72), ((48,), 33, 65), ((16,), 8, 5000)])
def test_values_and_gradients(threads, onednn, rows, width, outputs, biased):
    torch.manual_seed(0)
    shapes = [(*rows, width), (outputs, width), *([(outputs,)] if biased else [])]
    exact = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    ours = [tensor.detach().float().requires_grad_() for tensor in exact]
    gradient = torch.randn((outputs, *rows), dtype=torch.float64).movedim(0, -1)  # its rows are not contiguous
    want = torch.nn.functional.linear(*exact)
    got = kernels.linear(*ours, *([] if biased else [None]))
    wanted = torch.autograd.grad(want, exact, gradient)
    found = torch.autograd.grad(got, ours, gradient.float())
    assert got.shape == want.shape
    for one, other in zip((got, *found), (want, *wanted), strict=True):
        assert apart(one, other.detach()) < 100 * EPSILON
    with torch.no_grad():
        assert torch.equal(kernels.linear(*ours, *([] if biased else [None])), got)
    total = torch.Size(rows).numel()
    of_weight = (outputs, width) if outputs <= width else (width, outputs)
    assert onednn == [(total, outputs), (total, width), of_weight, (total, outputs)]


def test_frozen_weights_and_inputs_get_no_gradient(onednn):
    inputs, weight = torch.randn(16, 8), torch.randn(4, 8)
    frozen = kernels.linear(inputs.requires_grad_(), weight, None)
    frozen.sum().backward()
    assert weight.grad is None
    assert apart(inputs.grad, weight.sum(0).double().expand(16, 8)) < 100 * EPSILON
    kernels.linear(inputs.detach(), weight.requires_grad_(), None).sum().backward()
    assert apart(weight.grad, inputs.detach().sum(0).double().expand(4, 8)) < 100 * EPSILON


@pytest.mark.parametrize(
    ("inputs", "weight", "least"),
    [
        (torch.ones(15, 8), torch.ones(4, 8), 1),
        (torch.ones(16, 8), torch.ones(4, 8), 16 * 8 * 4 + 1),
        (torch.ones(16, 8, dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16), 1),
        (torch.ones(16, 8, device="meta"), torch.ones(4, 8, device="meta"), 1),
        (torch.ones(0, 8), torch.ones(4, 8), 1),
    ],
    ids=["rows that do not recur", "a small product", "bfloat16", "another device", "no rows"],
)
def test_other_products_are_left_to_torch(onednn, monkeypatch, inputs, weight, least):
    monkeypatch.setattr(kernels, "LEAST", least)
    assert kernels.linear(inputs, weight, None).shape == (len(inputs), 4)
    assert not onednn


def test_a_large_product_may_have_any_number_of_rows(onednn, monkeypatch):
    monkeypatch.setattr(kernels, "ANY_ROWS", 15 * 8 * 4)
    assert kernels.linear(torch.ones(15, 8), torch.ones(4, 8), None).eq(8).all()
    assert onednn == [(15, 4)]


@pytest.mark.parametrize(
    ("capability", "vendor", "faster"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_onednn_computes_where_mkl_does_not_use_avx_512(monkeypatch, tmp_path, capability, vendor, faster):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n", encoding="utf-8")
    monkeypatch.setattr(kernels, "PROCESSORS", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert kernels.onednn_is_faster.__wrapped__() is faster
    monkeypatch.setattr(kernels, "PROCESSORS", Path("/nonexistent"))  # not Linux
    assert not kernels.onednn_is_faster.__wrapped__()


def policy(path, **how):
    settings = {"optim": OptimConfig(lr=1e-3), "ppo_mini_batch_size": 4, "use_kl_loss": True, **how}
    return TorchPolicyBackend(path, ActorConfig(**settings), strategy=PlainStrategy(TorchConfig()))


@pytest.mark.parametrize("packed", [True, False])
def test_a_policy_learns_the_same(model_path, training_batch, monkeypatch, request, packed):
    monkeypatch.setattr(kernels, "onednn_is_faster", lambda: False)
    plain = policy(model_path, use_remove_padding=packed)
    data, first = training_batch(plain, rows=8), weights_of(plain)
    shapes = request.getfixturevalue("onednn")
    ours = policy(model_path, use_remove_padding=packed)
    for _ in range(3):
        one, other = plain.update(data, temperature=0.8), ours.update(data, temperature=0.8)
        assert one == near(other, 1e-5, data)
    assert torch.dist(weights_of(plain), weights_of(ours)) < 1e-2 * torch.dist(weights_of(plain), first)
    assert shapes or not packed
    assert not any(rows % kernels.ROWS for rows, _ in shapes)


def generated(engine, requests):
    return asyncio.run(engine.generate(requests, SamplingParams(max_new_tokens=24)))


def test_generations_are_the_same(model_path, monkeypatch, request):
    monkeypatch.setattr(kernels, "onednn_is_faster", lambda: False)
    requests = [GenerationRequest(uid="p", session=s, prompt_ids=(3, 4, 5)) for s in range(40)]
    plain = HFRolloutEngine(model_path)
    want = generated(plain, requests)
    shapes = request.getfixturevalue("onednn")
    got = generated(HFRolloutEngine(model_path), requests)
    assert [one.response_ids for one in got] == [one.response_ids for one in want]
    assert {rows for rows, _ in shapes} <= {16, 32}
    assert shapes
