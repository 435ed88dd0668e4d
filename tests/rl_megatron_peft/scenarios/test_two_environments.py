"""One Ray cluster, two environments: training with transformers 4, generation with 5."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bridge
HERE = Path(__file__).parents[1]
OTHER = HERE.parents[1] / ".venv" / "bin" / "python"
"""The interpreter of this workspace's main environment."""
T = 60.0


def load_program():
    spec = importlib.util.spec_from_file_location("megatron_program", HERE / "megatron_program.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment():
    """Return the environment's folder and the major version of its transformers."""
    from importlib.metadata import version

    return sys.prefix, int(version("transformers").split(".")[0])


class Trainer:
    """A policy on Megatron-Core with the sender of the weight sync."""

    def __init__(self, path):
        import torch.distributed as dist

        from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineRegistry
        from rl_megatron_peft import Layout
        from rl_megatron_peft.backend.model.megatron_bridge import BridgeMapping
        from rl_megatron_peft.backend.parallel import open_ranks

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.program = load_program()
        ranks = open_ranks(Layout())
        self.policy = self.program.policy_of(path, ranks, "fused", mapping=BridgeMapping)
        self.engine = CheckpointEngineRegistry().create("ray", CheckpointEngineConfig())

    def environment(self):
        return environment()

    def send(self):
        """Train a step, then offer the weights with adapters merged."""
        self.policy.update(self.program.batch_of(6, 0), temperature=1.0)
        manifest = asyncio.run(self.engine.send_weights(self.policy.named_weights(), 1, timeout_s=T))
        self.engine.finalize(1)
        return manifest.encode()

    def log_probs(self, prompts, responses):
        from rl_protocol import BatchData, ragged

        batch = BatchData({"prompts": ragged(prompts, "int64"), "responses": ragged(responses, "int64")})
        found = self.policy.compute_log_probs(batch, temperature=1.0).ragged("log_probs")
        return [row.tolist() for row in found.rows()]


class Rollout:
    """A transformers engine with the receiver of the weight sync."""

    def __init__(self, path):
        from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineRegistry
        from rl_trainer.rollout.hf_engine import HFRolloutEngine

        self.rollout = HFRolloutEngine(path)
        self.engine = CheckpointEngineRegistry().create("ray", CheckpointEngineConfig())

    def environment(self):
        return environment()

    def receive(self, manifest):
        from rl_ckpt_engine import Manifest

        sent = Manifest.decode(manifest)
        kind = type(self.engine)
        self.engine.init_process_group(kind.build_topology(sent.sender, [self.engine.prepare()]).receivers[0])
        self.rollout.load_weights(asyncio.run(self.engine.receive_weights(sent, timeout_s=T)), 1)

    def generate(self, prompts):
        from rl_protocol.ports import GenerationRequest, SamplingParams

        asked = [GenerationRequest(uid=str(i), session=0, prompt_ids=tuple(ids)) for i, ids in enumerate(prompts)]
        done = asyncio.run(self.rollout.generate(asked, SamplingParams(max_new_tokens=8)))
        return [list(g.response_ids) for g in done], [list(g.log_probs) for g in done]


@pytest.mark.skipif(not OTHER.exists(), reason=f"there is no {OTHER}: run `uv sync`, with UV_PROJECT_ENVIRONMENT unset")
def test_a_trainer_and_a_rollout_engine_of_other_environments_work_together(even_models):
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    try:
        path = even_models / "llama"
        trainer = ray.remote(num_cpus=0)(Trainer).remote(path)
        rollout = ray.remote(num_cpus=0, runtime_env={"py_executable": str(OTHER)})(Rollout).remote(path)
        (home, four), (away, five) = ray.get([trainer.environment.remote(), rollout.environment.remote()], timeout=240)
        assert (Path(away), four, five) == (OTHER.parents[1], 4, 5)
        assert home != away
        prompts = [[2, 3], [4, 5, 6], [7]]
        manifest = trainer.send.remote()

        def largest_difference():
            """Compare the log-probs of generated tokens with the trainer's."""
            responses, log_probs = ray.get(rollout.generate.remote(prompts), timeout=T)
            computed = ray.get(trainer.log_probs.remote(prompts, responses), timeout=T)
            return max(
                abs(a - b)
                for row, other in zip(log_probs, computed, strict=True)
                for a, b in zip(row, other, strict=True)
            )

        assert largest_difference() > 0.01  # only the trainer has trained weights
        ray.get(rollout.receive.remote(manifest), timeout=T)
        assert largest_difference() < 1e-4
    finally:
        ray.shutdown()
