"""RMSNorm and rotary embeddings against their definitions in float64."""

from __future__ import annotations

import pytest
import torch
from relative import apart

from rl_trainer.kernels.elementwise import rms_norm, rotate, rotation

pytestmark = pytest.mark.numeric


def normed(inputs, weight):
    return inputs / (inputs.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight


def rotated(states, angles_low, angles_high):
    low, high = states.chunk(2, -1)
    return torch.cat(
        [
            low * angles_low.cos() - high * angles_low.sin(),
            high * angles_high.cos() + low * angles_high.sin(),
        ],
        -1,
    )


def rotate_by(states, angles_low, angles_high):
    angles = torch.cat([angles_low, angles_high], -1)
    return rotate(states, rotation(angles.cos(), angles.sin()))


CASES = {
    "rms_norm": (normed, lambda x, w: rms_norm(x, w, 1e-3), [(2, 7, 24), (24,)], 2),
    "rotate": (rotated, rotate_by, [(2, 3, 7, 8), (2, 1, 7, 4), (2, 1, 7, 4)], 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, dtype):
    torch.manual_seed(0)
    definition, ours, shapes, trained = CASES[case]
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    exact = [tensor.double().requires_grad_(i < trained) for i, tensor in enumerate(inputs)]
    inputs = [tensor.requires_grad_(i < trained) for i, tensor in enumerate(inputs)]
    want, got = definition(*exact), ours(*inputs)
    gradient = torch.randn(want.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(want, exact[:trained], gradient)
    found = torch.autograd.grad(got, inputs[:trained], gradient.to(dtype))
    assert got.shape == want.shape
    for one, other in zip((got, *found), (want, *wanted), strict=True):
        assert one.dtype == dtype
        assert apart(one.double(), other.detach()) < (100 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps
    with torch.no_grad():
        assert torch.equal(ours(*inputs), got)


def test_a_frozen_input_has_no_gradient():
    torch.manual_seed(0)
    inputs, weight = torch.randn(3, 8), torch.randn(8)
    (of_inputs,) = torch.autograd.grad(rms_norm(inputs.requires_grad_(), weight, 1e-3).sum(), [inputs])
    both = torch.autograd.grad(rms_norm(inputs, weight.requires_grad_(), 1e-3).sum(), [inputs, weight])
    (of_weight,) = torch.autograd.grad(rms_norm(inputs.detach(), weight, 1e-3).sum(), [weight])
    assert torch.equal(of_inputs, both[0])
    assert torch.equal(of_weight, both[1])


def test_rotated_states_keep_their_layout():
    tokens_first = torch.randn(2, 7, 3, 8).transpose(1, 2)
    angles = torch.randn(2, 1, 7, 4)
    assert rotate_by(tokens_first, angles, angles).stride() == tokens_first.stride()


def test_a_row_of_zeros_is_normed_to_zeros():
    zeros = torch.zeros(2, 8, requires_grad=True)
    normed_zeros = rms_norm(zeros, torch.ones(8), 1e-3)
    (gradient,) = torch.autograd.grad(normed_zeros.sum(), [zeros])
    assert not normed_zeros.any()
    assert torch.isfinite(gradient).all()
