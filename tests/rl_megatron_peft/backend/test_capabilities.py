"""`capabilities` agrees with the installed Megatron-Core, on CPU and GPU."""

from __future__ import annotations

import datetime
import warnings

import pytest

from rl_megatron_peft import Layout, ModelShape


@pytest.fixture
def build(models, tmp_path):
    """Builds a model on one rank that trains all weights, on the device that Megatron uses here."""
    import torch
    import torch.distributed as dist

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # import warnings of Megatron-Core and its dependencies
        from rl_megatron_peft.backend.model.gpt import build_model
        from rl_megatron_peft.backend.model.weight_mapping import OwnMapping
        from rl_megatron_peft.backend.parallel import close_ranks, open_ranks

    gpu = torch.cuda.is_available()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(tmp_path / "store"), 1)
        timeout = datetime.timedelta(seconds=120)
        dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=0, world_size=1, timeout=timeout)
        ranks, shape = open_ranks(Layout()), ModelShape.read(models / "llama")

        def built():
            made = build_model(shape, ranks)
            OwnMapping(models / "llama", shape, ranks).load(made)
            return made.requires_grad_(True)

        yield built
        close_ranks()
        dist.destroy_process_group()


def distributed_optimizer(model):
    """Return Megatron's distributed optimizer and its wrapper of the model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    replicas = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.0, adam_eps=1e-8, clip_grad=0.5, use_distributed_optimizer=True
    )
    return get_megatron_optimizer(config, [replicas]), replicas


def loss_of(model):
    import torch

    device = next(model.parameters()).device
    ids = torch.arange(12, device=device).reshape(2, 6)
    logits = model(ids, torch.arange(6, device=device).expand(2, 6), None)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_what_megatron_refuses_on_the_cpu_is_not_promised(build):
    import torch
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    from rl_megatron_peft.backend.capabilities import capabilities
    from rl_megatron_peft.backend.cpu_shims import runnable

    if torch.cuda.is_available():
        pytest.skip("of machines without a GPU")
    found, model = capabilities(), build()
    assert (found.distributed_optimizer, found.megatron_clipping, found.sequence_parallel) == (False, False, True)
    with runnable(), pytest.raises(TypeError, match=r"must be one of torch\.cuda\.FloatTensor"):
        distributed_optimizer(model)
    weight = next(model.parameters())
    weight.grad = torch.ones_like(weight)
    with runnable(), pytest.raises(AssertionError):
        clip_grad_by_total_norm_fp32([weight], 0.5, 1.0)


@pytest.mark.gpu
def test_megatrons_optimizer_and_clipping_step_as_torch_does_on_a_gpu(build):
    """Not run yet: no GPU was available."""
    import torch

    from rl_megatron_peft.backend.capabilities import capabilities

    assert capabilities().distributed_optimizer
    assert capabilities().megatron_clipping
    model, other = build(), build()  # its process groups can't be copied
    adam = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.0)
    optimizer, replicas = distributed_optimizer(model)
    for _ in range(3):
        replicas.zero_grad_buffer()
        loss_of(replicas).backward()
        replicas.finish_grad_sync()
        good, norm, _ = optimizer.step()
        adam.zero_grad()
        loss_of(other).backward()
        want = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        adam.step()
        assert good
        assert norm == pytest.approx(float(want), rel=1e-4)
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, same, atol=1e-5, rtol=1e-4)
