"""Log-probs, entropies and exact divergences of logits against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from relative import apart
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_protocol import KeptSets
from rl_protocol.kept_tokens import KeptTokens
from rl_trainer.algorithms import log_probs
from rl_trainer.algorithms.log_probs import (
    full_kl,
    linear_log_probs,
    log_prob_columns,
    sum_pi_squared,
)

pytestmark = pytest.mark.numeric


def test_full_divergence_against_numpy_and_autograd():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 6)), rng.normal(size=(3, 6))
    p, q = (np.exp(x / 0.7) / np.exp(x / 0.7).sum(-1, keepdims=True) for x in (a, b))
    logits = torch.tensor(a, dtype=torch.float32, requires_grad=True)
    kl = full_kl(logits, torch.tensor(b, dtype=torch.float32), 0.7)
    truth = (p * np.log(p / q)).sum(-1)
    assert apart(kl, truth, np.log(p)) < 1e-5
    kl.sum().backward()
    slope = p * (np.log(p / q) - truth[:, None]) / 0.7
    assert apart(logits.grad, slope, np.log(p) / 0.7) < 1e-5


def test_readings_of_logits_against_numpy():
    rng = np.random.default_rng(0)
    logits, tokens = rng.normal(size=(5, 7)), rng.integers(0, 7, 5)
    scores = torch.tensor(logits, dtype=torch.float32)
    log_prob, entropy = log_prob_columns(scores, torch.tensor(tokens), 0.7, squares=False)
    p = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum(-1, keepdims=True)
    assert apart(log_prob, np.log(p[np.arange(5), tokens])) < 1e-5
    assert apart(entropy, -(p * np.log(p)).sum(-1)) < 1e-5
    squares = sum_pi_squared(torch.tensor(logits, dtype=torch.float32), 0.7)
    assert apart(squares, (p * p).sum(-1)) < 1e-5


TOKENS, VOCABULARY, WIDTH = 37, 50, 8


class Tensors(TorchDispatchMode):
    """The shapes of the tensors that operations return."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    @property
    def largest(self):
        return max(map(math.prod, self.shapes))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out


def layer(dtype=torch.float32):
    """Inputs, weight, bias and tokens of a layer."""
    torch.manual_seed(0)
    shapes = (TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)
    return *(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes), torch.randint(0, VOCABULARY, (TOKENS,))


def gradients(columns, inputs, rows=2):
    """Of a sum that weighs each log-prob and each entropy differently."""
    torch.manual_seed(1)
    return torch.autograd.grad((columns[:rows] * torch.randn(rows, TOKENS)).sum(), inputs)


@pytest.mark.parametrize("rows", [1, 5, TOKENS - 1])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [True, False])
def test_chunks_give_what_the_whole_gives(rows, temperature, with_bias, monkeypatch):
    hidden, weight, bias, tokens = layer()
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    logits = torch.nn.functional.linear(*inputs)
    whole = log_prob_columns(logits, tokens, temperature, squares=True)
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", rows * VOCABULARY * 4)
    chunked = linear_log_probs(hidden, weight, bias if with_bias else None, tokens, temperature, squares=True)
    for ours, truth in zip((chunked, *gradients(chunked, inputs)), (whole, *gradients(whole, inputs)), strict=True):
        assert (ours - truth).norm() < 1e-5 * truth.norm()


@pytest.mark.parametrize("rows", [1, 5, TOKENS])
def test_several_tokens_and_the_most_probable_ones(rows, monkeypatch):
    """Log-probs of three tokens in each place, and the four largest with their tokens."""
    hidden, weight, bias, _ = layer()
    several, inputs = torch.randint(0, VOCABULARY, (TOKENS, 3)), (hidden, weight, bias)
    several[0] = several[0, 0]  # the same token thrice
    log_p = torch.log_softmax(torch.nn.functional.linear(*inputs) / 0.7, -1)
    best = log_p.sort(-1, descending=True)
    p = log_p.exp()
    truth = torch.cat(
        [
            log_p.gather(-1, several).t(),
            -(p * log_p).sum(-1)[None],
            (p * p).sum(-1)[None],
            best.values[:, :4].t(),
            best.indices[:, :4].t(),
        ]
    )
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", rows * VOCABULARY * 4)
    ours = linear_log_probs(*inputs, several, 0.7, squares=True, top=4)
    assert ours.shape == (3 + 1 + 1 + 4 + 4, TOKENS)
    assert torch.equal(ours[-4:], truth[-4:])
    for a, b in zip((ours, *gradients(ours, inputs, 4)), (truth, *gradients(truth, inputs, 4)), strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_chunks_sum_the_gradient_of_bfloat16_weights_in_float32(monkeypatch):
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", VOCABULARY * 4)
    hidden, weight, bias, tokens = layer(torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in (hidden, weight, bias)]
    ours = linear_log_probs(hidden, weight, bias, tokens, 1.0, squares=False)
    truth = log_prob_columns(torch.nn.functional.linear(*exact), tokens, 1.0, squares=False)
    for a, b in zip(gradients(ours, (hidden, weight, bias)), gradients(truth, exact), strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b).norm() < 2**-6 * b.norm()


def test_no_tensor_of_a_pass_holds_more_than_a_chunk(monkeypatch):
    rows = 10
    hidden, weight, bias, tokens = layer()
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", rows * VOCABULARY * 4)
    with Tensors() as seen:
        gradients(linear_log_probs(hidden, weight, bias, tokens, 0.7, squares=True), (hidden, weight, bias))
    assert seen.largest == rows * VOCABULARY
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", TOKENS * VOCABULARY * 4)
    with Tensors() as seen:
        linear_log_probs(hidden, weight, bias, tokens, 0.7, squares=True)
    assert seen.largest == TOKENS * VOCABULARY


def test_a_frozen_layer_gets_no_gradient(monkeypatch):
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", VOCABULARY * 4)
    hidden, weight, _, tokens = layer()
    columns = linear_log_probs(hidden, weight.detach(), None, tokens, 1.0, squares=False)
    with Tensors() as seen:
        gradients(columns, (hidden,))
    assert (TOKENS, WIDTH) in seen.shapes
    assert (VOCABULARY, WIDTH) not in seen.shapes


def some_kept(tokens):
    """Which tokens are kept in each place, `tokens` [T] among them; all in every 4th place."""
    kept = np.random.default_rng(0).random((TOKENS, VOCABULARY)) < 0.3
    kept[np.arange(TOKENS), tokens.numpy()] = True
    kept[::4] = True
    return kept


def test_over_three_kept_tokens_by_hand():
    """Logits log 1, log 2, log 5 and log 92, of which the last is excluded: 1, 2 and 5 eighths."""
    logits = torch.log(torch.tensor([[1.0, 2.0, 5.0, 92.0]], dtype=torch.float64)).float()
    kept = KeptTokens(KeptSets.from_ids([[0, 1, 2]], 4), logits.device)
    out = log_prob_columns(logits, torch.tensor([2]), 1.0, squares=True, top=3, kept=kept)[:, 0].tolist()
    eighths = [math.log(n / 8) for n in (5, 2, 1)]
    entropy = -sum(math.exp(x) * x for x in eighths)
    assert out == pytest.approx([eighths[0], entropy, 30 / 64, *eighths, 2, 1, 0], rel=1e-6)


@pytest.mark.parametrize("rows", [1, 5, TOKENS])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_excluded_tokens_have_neither_probability_nor_gradient(rows, temperature, monkeypatch):
    """Log-probs, entropies and gradients against float64 softmax over the kept logits alone."""
    hidden, weight, bias, tokens = layer()
    mask = some_kept(tokens)
    inputs = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    scores = torch.nn.functional.linear(*inputs) / temperature
    truth = []
    for row, keep in enumerate(torch.from_numpy(mask)):
        log_p = torch.log_softmax(scores[row][keep], -1)
        place = int(keep[: tokens[row]].sum())
        truth.append(torch.stack([log_p[place], -(log_p.exp() * log_p).sum()]))
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", rows * VOCABULARY * 4)
    kept = KeptTokens(KeptSets.from_mask(mask), hidden.device)
    ours = linear_log_probs(hidden, weight, bias, tokens, temperature, squares=False, kept=kept)
    truth = torch.stack(truth, 1)
    pairs = zip((ours, *gradients(ours, (hidden, weight, bias))), (truth, *gradients(truth, inputs)), strict=True)
    for a, b in pairs:
        assert torch.isfinite(a).all()
        assert (a - b).norm() < 1e-5 * b.norm()


def test_the_log_prob_of_an_excluded_token_has_no_gradient_of_its_own(monkeypatch):
    """As in the distillation of a teacher whose most probable tokens were excluded."""
    hidden, weight, bias, tokens = layer()
    mask = some_kept(tokens)
    kept = KeptTokens(KeptSets.from_mask(mask), hidden.device)
    several = torch.stack([tokens, torch.from_numpy((~mask).argmax(1))], 1)  # the first excluded one

    def found(chunk):
        monkeypatch.setattr(log_probs, "CHUNK_BYTES", chunk * VOCABULARY * 4)
        out = linear_log_probs(hidden, weight, bias, several, 1.0, squares=False, kept=kept)
        return torch.autograd.grad((out[0] * out[0].detach() + 0.1 * out[1]).sum(), (hidden, weight, bias))

    for a, b in zip(found(3), found(TOKENS), strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()
