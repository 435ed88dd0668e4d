"""Train cells of the table of combinations: combinations_program.py ENGINE TEXT SIGHTED OUT CELL...

TEXT and SIGHTED are checkpoint folders. A cell is adapters/roles/rows, such as
`dora/critic/images`. All cells of an engine run one after another in the same ranks: five updates,
then policy and critic are saved and read again. OUT/ENGINE.json says of each cell that it runs, or
why it is refused.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from ranks import in_ranks, join_ranks

if TYPE_CHECKING:
    import torch

    from rl_app_ppo.config.schema import AppConfig
    from rl_protocol import BatchData
    from rl_protocol.support.rendezvous import RendezvousListener

RANKS = {"torch": 1, "fsdp": 2, "megatron": 1}
ADAPTERS = {
    "full": (),
    "lora": ("lora.rank=4", "lora.alpha=8"),
    "dora": ("lora.rank=4", "lora.alpha=8", "lora.use_dora=true"),
}
LEARNS = ("optim.lr=1e-2", "optim.lr_warmup_steps=0", "ppo_mini_batch_size=4")
ROWS, UPDATES, PIECE = 4, 5, 3


def config_of(engine: str, cell: str, model: Path, rows: Path) -> AppConfig:
    """The configuration of a cell, which the checks before a run have accepted."""
    from rl_app_ppo.checks.facts import Facts
    from rl_app_ppo.checks.registry import preflight
    from rl_app_ppo.config.loading import load_config
    from rl_ckpt_engine import PluginPolicy

    adapters, roles, shown = cell.split("/")
    given = [f"model_engine={engine}", f"model.path={model}", "rollout.n=2", "data.train_batch_size=4"]
    given += [f"actor.{setting}" for setting in LEARNS] + list(ADAPTERS[adapters])
    given += ["fsdp.world_size=2", "fsdp.device=cpu"] if engine == "fsdp" else []
    if roles == "critic":
        given += ["algorithm=ppo", *(f"critic.{setting}" for setting in LEARNS)]
        given += ["critic.use_lora=true"] if adapters != "full" else []
    if shown == "images":
        given += [f"data.train_files={rows}", f"data.val_files={rows}", "rollout.response_length=4"]
        given += [f"model.cache_dir={rows.parent}"]
    config = load_config(given)
    preflight(Facts(config, PluginPolicy()))
    return config


def write_row(path: Path) -> Path:
    """A data file whose row has an image, for the checks before a run."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (16, 8)).save(file, "PNG")
    row = {
        "prompt": [{"role": "user", "content": "<image>"}],
        "data_source": "d",
        "reward_model": {"ground_truth": "a"},
        "images": ["data:image/png;base64," + base64.b64encode(file.getvalue()).decode()],
    }
    path.write_text(json.dumps(row) + "\n")
    return path


def batch_of(step: int, rank: int, ranks: int, *, images: bool) -> BatchData:
    """This rank's trajectories of an update; with images, only every other row has one.

    Of two ranks, the second has no image.
    """
    import numpy as np

    from rl_protocol import BatchData, ragged
    from rl_protocol.ports import ImageInput
    from rl_trainer.data.image_columns import image_columns

    rng = np.random.default_rng(step)
    shows = [images and not row % 2 for row in range(ROWS)]
    prompts = [[5, 2, PIECE, PIECE, 4, 9] if one else rng.integers(5, 10, 3).tolist() for one in shows]
    responses = [rng.integers(5, 10, rng.integers(2, 6)).tolist() for _ in range(ROWS)]
    pixels = rng.normal(size=(ROWS, 8, 96)).astype(np.float32)
    shown = [(ImageInput(pixels[i], (1, 2, 4)),) if one else () for i, one in enumerate(shows)]

    def column(mean: float) -> Any:
        return ragged([(mean + rng.normal(size=len(r))).tolist() for r in responses], "float32")

    batch = BatchData(
        {
            "prompts": ragged(prompts, "int64"),
            "responses": ragged(responses, "int64"),
            "response_mask": ragged([[True] * len(r) for r in responses], "bool"),
            "advantages": column(0.0),
            "ref_log_prob": column(-2.0),
            "values": column(0.0),
            "returns": column(0.5),
            **(image_columns(shown) if images else {}),
        }
    )
    return batch.select_rows(list(range(rank, ROWS, ranks)))


class Session:
    """The ranks of an engine, in which cells run one after another."""

    def __init__(self, engine: str, rank: int, listener: RendezvousListener) -> None:
        self.engine, self.rank, self.ranks = engine, rank, RANKS[engine]
        if engine == "megatron":
            from rl_app_ppo.config.loading import load_config
            from rl_app_ppo.worker.megatron import join_ranks as join_megatron
            from rl_protocol.support.rendezvous import Rendezvous

            meeting = Rendezvous(rank=0, size=1, address=listener.address, listener=listener)
            self._megatron = join_megatron(load_config(["model_engine=megatron", "lora.rank=2"]), meeting)
        elif engine == "fsdp":
            self._world = join_ranks(rank, self.ranks, listener)

    def models(self, config: AppConfig, path: Path, *, critic: bool) -> tuple[Any, Any]:
        """Policy and critic, as a worker builds them."""
        if self.engine == "megatron":
            from rl_app_ppo.worker.megatron import megatron_critic, megatron_policy

            policy = megatron_policy(config, path, self._megatron)
            return policy, megatron_critic(config, path, self._megatron) if critic else None
        from rl_trainer.backends.parallel_strategy import FsdpStrategy, PlainStrategy
        from rl_trainer.backends.torch_critic import TorchCriticBackend
        from rl_trainer.backends.torch_policy import TorchPolicyBackend

        strategy = FsdpStrategy(config.fsdp, self._world) if self.engine == "fsdp" else PlainStrategy()
        policy = TorchPolicyBackend(path, config.actor, lora=config.lora, strategy=strategy)
        if not critic:
            return policy, None
        lora = config.lora if config.critic.use_lora else None
        return policy, TorchCriticBackend(path, config.critic, lora=lora, rollout_n=1, seed=0, strategy=strategy)

    def meet(self) -> None:
        """Wait until all ranks are here."""
        if self.engine == "fsdp":
            self._world.total([0.0])

    def run(self, cell: str, config: AppConfig, path: Path, out: Path) -> None:
        """Train a cell, and read what it has saved."""
        import numpy as np

        images = cell.endswith("images")
        policy, critic = self.models(config, path, critic="/critic/" in cell)
        mine = list(range(ROWS // self.ranks))
        for step in range(UPDATES):
            batch = batch_of(step, self.rank, self.ranks, images=images)
            old = policy.compute_log_probs(batch, temperature=1.0)["log_probs"]
            data = type(batch)({**batch.columns, "old_log_probs": old})
            metrics = policy.update_local(data, [mine], temperature=1.0)
            metrics |= critic.update_local(data, [mine]) if critic is not None else {}
            assert all(np.isfinite(value) for value in metrics.values()), metrics
            assert metrics["actor/grad_norm"] > 0
        self._check_policy(policy, config, path, out / "policy", images=images)
        if critic is not None:
            batch = batch_of(0, self.rank, self.ranks, images=images)
            values = critic.compute_values(batch)["values"].values
            assert np.isfinite(values).all()
            assert np.abs(values).max() > 1e-3  # they were 0 at first
            (out / "critic").mkdir(parents=True, exist_ok=True)
            write = critic.snapshot()
            write(out / "critic")
            self.meet()
            _, again = self.models(config, path, critic=True)
            again.restore(out / "critic")
            assert np.array_equal(again.compute_values(batch)["values"].values, values)

    def _check_policy(self, policy: Any, config: AppConfig, path: Path, folder: Path, *, images: bool) -> None:
        """The parameters have moved, and what is saved is what transformers and peft read."""
        import peft
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        from rl_protocol.torch import from_weight

        weights: dict[str, torch.Tensor] = {one.name: from_weight(one).clone() for one in policy.named_weights()}
        policy.save_pretrained(folder)
        if self.rank:
            return
        kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
        base: Any = kind.from_pretrained(path)
        first = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        saved: Any = peft.PeftModel.from_pretrained(base, folder) if config.lora.rank else kind.from_pretrained(folder)
        found = (saved.merge_and_unload() if config.lora.rank else saved).state_dict()
        moved = [name for name, tensor in weights.items() if not tensor.equal(first[name])]
        assert len(moved) >= 2, moved
        for name, tensor in weights.items():
            assert torch.isfinite(tensor).all(), name
            assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-5 * float(tensor.abs().max())), name


def rank_main(
    rank: int, engine: str, text: Path, sighted: Path, out: Path, cells: list[str], listener: RendezvousListener
) -> None:
    import torch

    from rl_protocol import ConfigError

    torch.set_num_threads(1)
    session, results, rows = Session(engine, rank, listener), dict[str, str](), out / f"{engine}-{rank}.jsonl"
    write_row(rows)
    for cell in cells:
        path = sighted if cell.endswith("images") else text
        try:
            config = config_of(engine, cell, path, rows)
        except ConfigError as error:
            results[cell] = str(error).replace(str(path), "PATH")
            continue
        session.run(cell, config, path, out / engine / cell)
        results[cell] = "runs"
    if not rank:
        (out / f"{engine}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    from rl_protocol.support.rendezvous import RendezvousListener as Listener

    engine, *paths = sys.argv[1:5]
    in_ranks(RANKS[engine], rank_main, engine, *map(Path, paths), sys.argv[5:], Listener())
