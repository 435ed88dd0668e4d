"""`--plan`: sizes from a model's configuration, checked by hand and against real models."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rl_app_ppo.checks import facts, plan, registry
from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.model_size import model_size
from rl_app_ppo.checks.role_memory import role_bytes
from rl_app_ppo.cli.main import main
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.inputs.tokenizer import vision_of
from rl_ckpt_engine import PluginPolicy
from rl_protocol import BatchData, ConfigError, ragged
from rl_trainer.backends.parallel_strategy import PlainStrategy
from rl_trainer.backends.peft_lora import attach
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.config.backends import TorchConfig
from rl_trainer.config.lora import LoraConfig

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, WORDS = 3, 64, 4, 2, 160, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a configuration and nothing else."""
    path = tmp_path_factory.mktemp("model")
    Qwen2Config(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """The same of a model with eight experts a layer, three of which read each token."""
    path = tmp_path_factory.mktemp("experts")
    Qwen3MoeConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        num_experts=8,
        num_experts_per_tok=3,
        max_position_embeddings=512,
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def seeing(make_vision_model):
    return make_vision_model("qwen3_vl")


def real(folder):
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForImageTextToText if "vision_config" in config.sub_configs else AutoModelForCausalLM
    return kind.from_config(config, attn_implementation="sdpa")


def test_weights_keys_and_values_are_counted_as_by_hand(folder, tmp_path):
    kv = HIDDEN // HEADS * KV_HEADS
    attention = HIDDEN * HIDDEN + HIDDEN + 2 * (HIDDEN * kv + kv) + HIDDEN * HIDDEN
    block = attention + 3 * HIDDEN * INNER + 2 * HIDDEN
    size = model_size(folder, LoraConfig())
    assert size.weights == size.trained == WORDS * HIDDEN + LAYERS * block + HIDDEN  # the tied head counts once
    assert size.kv_token == 2 * LAYERS * kv
    assert (size.outside, size.head) == (WORDS * HIDDEN + HIDDEN, 0)
    assert size.body == size
    Qwen2Config.from_pretrained(folder, tie_word_embeddings=False).save_pretrained(tmp_path)
    untied = model_size(tmp_path, LoraConfig())
    assert (untied.weights, untied.head) == (size.weights + WORDS * HIDDEN, WORDS * HIDDEN)
    assert (untied.body.weights, untied.body.outside) == (size.weights, size.outside)


@pytest.mark.parametrize(("name", "value"), [("hidden_act", "x"), ("use_sliding_window", {}), ("dtype", "llama")])
def test_a_wrong_field_of_the_configuration_is_named(folder, tmp_path, name, value):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(ConfigError, match=rf"(?s)model\.path='{tmp_path}' can't be loaded .* Look at its config\.json"):
        model_size(tmp_path, LoraConfig())


def test_of_a_model_with_adapters_only_these_are_trained(folder):
    lora = LoraConfig(rank=4, target_modules=("q_proj", "down_proj"), exclude=("layers.0.mlp.down_proj",))
    adapted = attach(real(folder), lora, 0)
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert model_size(folder, lora).trained == trained


@pytest.mark.parametrize(("kind", "within"), [("folder", 0.02), ("experts", 0.04), ("seeing", 0.04)])
def test_activations_are_those_that_a_real_forward_pass_keeps(kind, within, request):
    folder = request.getfixturevalue(kind)
    model, ids = real(folder), torch.zeros((1, 256), dtype=torch.long)
    found = kept_bytes(model, lambda: model.get_decoder()(input_ids=ids, use_cache=False))
    assert model_size(folder, LoraConfig()).activations(256, 4) == pytest.approx(found, rel=within)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_activations_of_images_are_those_that_a_real_vision_tower_keeps(family, make_vision_model):
    """Two images of 16 x 16 patches."""
    folder = make_vision_model(family)
    model, tower = real(folder), model_size(folder, LoraConfig()).vision
    pixels, grids = torch.randn(512, tower.numbers), torch.tensor([[1, 16, 16]] * 2)
    found = kept_bytes(model, lambda: model.model.visual(pixels, grid_thw=grids))
    assert tower.activations(512, 4) == pytest.approx(found, rel=0.04)
    assert tower.activations(512, 2) < 0.7 * found


def kept_bytes(model, forward):
    """What torch keeps on the CPU, where SDPA holds no [tokens, tokens]; besides the weights."""
    kept = dict[int, torch.UntypedStorage]()
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = forward()
        found = sum(storage.nbytes() for storage in kept.values())
    del out
    return found


@pytest.mark.parametrize("family", [GPT2Config, Gemma2Config, LlamaConfig, Qwen3Config])
def test_models_of_other_families_are_planned(family, tmp_path):
    family().save_pretrained(tmp_path)
    size = model_size(tmp_path, LoraConfig())
    assert size.weights > 10**8
    one, two = (size.activations(tokens, 2) for tokens in (16, 32))
    assert 1.9 < two / one < 2.1


def test_experts_are_divided_over_replicas(tmp_path):
    """Of 8 experts a rank of Megatron-Core holds 2, and all of the rest."""
    Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_experts=8,
        moe_intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    ).save_pretrained(tmp_path)
    options = ["model_engine=megatron", "megatron.expert_model_parallel_size=4", "megatron.world_size=4"]
    config = load_config(options)
    size = model_size(tmp_path, config.lora)
    assert size.experts == 2 * 8 * 3 * 16 * 32
    held = size.weights - size.experts * 3 // 4
    found = role_bytes("actor", config, size, on_gpu=True)
    assert (found["weights"], found["gradients"], found["optimizer"]) == (4 * held, 4 * held, 8 * held)
    assert role_bytes("rollout", config, size)["weights"] == 4 * size.weights
    config = load_config([*options, "lora.rank=2", "lora.target_modules=[o_proj,down_proj]"])
    size = model_size(tmp_path, config.lora)
    of_experts = 2 * 8 * 2 * (16 + 32)
    assert size.trained == 2 * 2 * (16 + 16) + of_experts
    assert role_bytes("actor", config, size)["optimizer"] == 8 * (size.trained - of_experts * 3 // 4)


def test_images_count_in_the_passes_of_those_that_see(make_vision_model):
    """Two sequences of 100 tokens with an image of 16 tokens each, of four patches each."""
    whole = [
        "data.train_files=none.jsonl",
        "data.max_prompt_length=60",
        "rollout.response_length=40",
        "torch.device=cpu",
    ]
    config = load_config([*whole, "algorithm=ppo", "actor.ppo_max_token_len=200", "critic.ppo_max_token_len=100"])
    size = model_size(make_vision_model("qwen2_5_vl"), config.lora)
    tower = size.vision
    text, seen = role_bytes("actor", config, size), role_bytes("actor", config, size, image_tokens=16)
    assert seen["activations"] - text["activations"] == tower.activations(2 * 16 * 4, 4)
    assert seen["images"] == 2 * 4 * tower.numbers * 2 * 16 * 4
    of_images, of_text = tower.activations(2 * 16 * 4, 4) // tower.layers, size.activations(200, 4) // size.layers
    layer = max(of_images, of_text)
    assert seen["allocator"] - text["allocator"] == layer - of_text
    critic = role_bytes("critic", config, size, image_tokens=16)
    assert critic["activations"] == size.activations(100, 4) + tower.activations(16 * 4, 4)
    again = load_config([*whole, "actor.ppo_max_token_len=200", "torch.activation_checkpointing=true"])
    between = 4 * (size.layers * size.hidden * 200 + tower.layers * tower.hidden * 2 * 16 * 4)
    assert role_bytes("actor", again, size, image_tokens=16)["activations"] == layer + between
    assert role_bytes("ref", config, size, image_tokens=16)["activations"] == layer
    assert "images" not in text


def test_the_images_of_a_plan_are_as_large_as_prompts_and_the_processor_allow(make_vision_model, tmp_path):
    path = make_vision_model("qwen2_5_vl")
    most = vision_of(path).tokens(1000, 1000)

    def planned(folder, length):
        made = load_config([f"model.path={folder}", "data.train_files=none.jsonl", f"data.max_prompt_length={length}"])
        return Facts(made, PluginPolicy()).planned_image_tokens

    assert planned(path, most + 1) == most
    assert planned(path, most - 1) == most - 1
    shutil.copy(path / "config.json", tmp_path)
    assert planned(tmp_path, most + 1) == most + 1, "the processor is not known"


def test_what_a_role_holds(folder):
    """16 bytes a weight where all are trained, sharded over ranks."""
    whole = [
        "model_engine=fsdp",
        "fsdp.world_size=2",
        "algorithm=ppo",
        "actor.ppo_max_token_len=64",
        "placement=separate",
    ]
    config = load_config(whole)
    size = model_size(folder, config.lora)
    outside = WORDS * HIDDEN + HIDDEN
    block = (size.weights - outside) // LAYERS
    gathered = {"gathered weights": 4 * (2 * outside + block)}
    lasting = {"weights": 2 * size.weights, "gradients": 2 * size.weights, "optimizer": 4 * size.weights}
    of_pass = {"activations": size.activations(64, 4), "logits": 4 * 64 * WORDS * 4}
    assert role_bytes("actor", config, size, on_gpu=True) == lasting | gathered | of_pass
    assert role_bytes("critic", config, size, on_gpu=True).keys() == {*lasting, *gathered, "activations"}
    kept = lasting["gradients"] + of_pass["activations"] // LAYERS
    assert role_bytes("actor", config, size)["allocator"] == kept + (80 << 20)
    layer = {"gathered weights": 4 * (outside + 2 * block), "activations": size.activations(64, 4) // LAYERS}
    assert role_bytes("ref", config, size, on_gpu=True) == {"weights": 2 * size.weights} | layer
    copies = role_bytes("rollout", config, size)
    assert copies["weights"] == copies["arriving weights"] == 4 * size.weights
    assert "arriving weights" not in role_bytes("rollout", config, size, on_gpu=True), "they wait in host memory"
    assert role_bytes("reward", config, size) == {}
    fused = load_config(["placement=fused"])
    assert role_bytes("rollout", fused, size).keys() == {"KV cache"}
    assert role_bytes("rollout", fused, size, on_gpu=True)["weights"] == 4 * size.weights, "the host lends none"
    adapted = load_config([*whole, "lora.rank=4"])
    size = model_size(folder, adapted.lora)
    assert role_bytes("actor", adapted, size)["optimizer"] == 4 * size.trained < size.weights
    assert role_bytes("critic", adapted, size)["optimizer"] == 4 * size.weights


@pytest.mark.parametrize(("memory", "shown"), [(0, "no GPU here, the estimate alone"), (80 << 30, "80.0 GiB here")])
def test_a_plan_for_gpus_names_the_memory_of_those_here(folder, capsys, monkeypatch, memory, shown):
    monkeypatch.setattr(facts, "gpu_memory", lambda: memory)
    wanted = [f"model.path={folder}", "model_engine=torch"]
    assert main(["--plan", *wanted, "trainer.n_gpus_per_node=8"]) == 0
    assert f"memory of each GPU: {shown}" in capsys.readouterr().out.splitlines()


def test_a_plan_is_printed_for_gpus_that_this_machine_does_not_have(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = ["model_engine=fsdp", "fsdp.world_size=4", "placement=actor+ref", "trainer.n_gpus_per_node=8"]
    assert main(["--plan", *wanted]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model: 333,184 weights, 333,184 of an actor trained; GPUs: 6"
    assert any(line.startswith("4 x actor+ref: 1 GPU, 0 CPUs reserved, ") for line in lines)
    assert any(line.startswith("2 x rollout: 1 GPU, 0 CPUs reserved, ") for line in lines)
    assert list(tmp_path.iterdir()) == []
    assert main(["--plan", *wanted[:-1], "trainer.n_gpus_per_node=3"]) == 2
    assert "not enough are left for actor_ref-3" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_is_within_15_percent_of_the_peak_on_a_gpu(tmp_path, dtype):
    """A model of 0.4 billion weights makes two steps of 2,048 tokens each."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
    made = Qwen2Config(vocab_size=32000, num_key_value_heads=4, tie_word_embeddings=True, pad_token_id=0, **sizes)
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    settings = [
        "model_engine=torch",
        f"torch.param_dtype={dtype}",
        "actor.ppo_max_token_len=2048",
        "actor.ppo_mini_batch_size=4",
    ]
    config = load_config([*settings, "rollout.n=1"])
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, 32000, 256).tolist() for _ in range(16)]
    ones = ragged([np.ones(256)] * 8, "float32")
    batch = BatchData(
        {
            "prompts": ragged(tokens[:8], "int64"),
            "responses": ragged(tokens[8:], "int64"),
            "response_mask": ragged([[True] * 256] * 8, "bool"),
            **dict.fromkeys(("old_log_probs", "advantages", "ref_log_prob"), ones),
        }
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    strategy = PlainStrategy(config.engine_as(TorchConfig), torch.device("cuda"))
    policy = TorchPolicyBackend(tmp_path, config.actor, rollout_n=1, strategy=strategy)
    policy.update(batch, temperature=1.0)
    peak = torch.cuda.max_memory_allocated() - before
    estimate = sum(role_bytes("actor", config, model_size(tmp_path, config.lora), on_gpu=True).values())
    assert peak == pytest.approx(estimate, rel=0.15)


def test_the_plan_of_several_hosts_has_the_storage_units_of_each(folder):
    wanted = [
        f"model.path={folder}",
        "trainer.nnodes=2",
        "transfer_queue.listen=127.0.0.1",
        "data.train_files=none.jsonl",
    ]
    made = plan.make_plan(load_config(wanted), PluginPolicy())
    assert made.storage_units == {1: 2, 2: 2}
    assert "; storage units: 2 on host 1, 2 on host 2\n" in plan.plan_text(made)
    kept = ["transfer_queue.durability=commit", "trainer.save_freq=1"]
    assert plan.make_plan(load_config([*wanted, *kept]), PluginPolicy()).storage_units == {1: 2, 2: 2}
    of_ray = plan.make_plan(load_config([*wanted, "transfer_queue.backend=ray"]), PluginPolicy())
    assert of_ray.storage_units == {0: 2}
    assert "; storage units: 2 on that of the driver\n" in plan.plan_text(of_ray)


def test_a_plan_that_needs_more_memory_than_there_is_warns_and_names_the_keys(folder, monkeypatch):
    monkeypatch.setattr(registry, "available_bytes", lambda: 100 << 20)
    made = plan.make_plan(load_config([f"model.path={folder}", "data.train_files=none.jsonl"]), PluginPolicy())
    found = next(finding for finding in made.checks if finding.what == "memory of passes")
    assert found.level == "warning"
    assert "100.0 MiB are available. The largest parts are " in found.text
    assert "actor.ppo_max_token_len (activations)" in found.text
    assert not made.refused


def test_without_settings_a_pass_is_planned_with_16384_tokens_or_one_longer_response(folder):
    def planned(*words):
        config = load_config([f"model.path={folder}", "data.train_files=none.jsonl", *words])
        return role_bytes("actor", config, model_size(folder, config.lora))["activations"]

    size = model_size(folder, LoraConfig())
    assert planned() == size.activations(16384, 4)
    assert planned("rollout.response_length=32768") == size.activations(32768 + 512, 4)
    assert planned("actor.ppo_mini_batch_size=1", "rollout.n=2") == size.activations(2 * 1024, 4)
    assert planned("actor.ppo_micro_batch_size=32") == size.activations(32 * 1024, 4)


def seeing_config(family, text, vision):
    return AutoConfig.for_model(
        family, text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"]
    )


@pytest.mark.parametrize(
    ("family", "text", "vision", "published"),
    [
        (
            "qwen2_vl",
            {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
            | {"num_hidden_layers": 28, "vocab_size": 151936, "tie_word_embeddings": True},
            {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16},
            2_208_985_600,
        ),
        (
            "qwen2_5_vl",
            {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
            | {"num_hidden_layers": 28, "vocab_size": 152064, "tie_word_embeddings": False},
            {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "num_heads": 16},
            8_292_166_656,
        ),
    ],
)  # fmt: skip
def test_a_model_that_sees_has_the_weights_that_its_files_have(family, text, vision, published, tmp_path):
    """Qwen2-VL-2B-Instruct and Qwen2.5-VL-7B-Instruct, as the headers of their files say."""
    seeing_config(family, text, vision).save_pretrained(tmp_path)
    size = model_size(tmp_path, LoraConfig())
    assert (size.weights, size.trained) == (published, published)
    assert size.layers == 28
    assert size.kv_token == 2 * 28 * text["num_key_value_heads"] * 128


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("rank", [0, 4])
def test_the_vision_tower_is_planned_and_trained_with_the_rest(family, rank, make_vision_model):
    """Real weights, by the names of their modules; their gradients and moments follow."""
    path, lora = make_vision_model(family), LoraConfig(rank=rank)
    model = real(path)
    named = dict(model.named_parameters())
    size = model_size(path, lora)
    assert size.weights == sum(weight.numel() for weight in named.values())
    assert size.vision.weights == sum(weight.numel() for name, weight in named.items() if ".visual." in name) > 0
    assert size.blocks == sum(weight.numel() for name, weight in named.items() if "language_model.layers." in name)
    both = sum(w.numel() for name, w in named.items() if ".layers." in name or ".visual.blocks." in name)
    assert size.outside == size.weights - both
    if rank:
        attach(model, lora, 0)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert size.trained == trained
    config = load_config([f"model.path={path}", "data.train_files=none.jsonl", f"lora.rank={rank}", "torch.device=cpu"])
    parts = role_bytes("actor", config, size)
    assert (parts["gradients"], parts["optimizer"]) == (4 * trained, 8 * trained)
    shown = plan.plan_text(plan.make_plan(config, PluginPolicy()))
    assert f"({size.vision.weights:,} of its vision tower)" in shown
    assert ", images " in shown


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("transfer_queue.backend=memory",), "transfer_queue.backend=memory"),
        (
            ("transfer_queue.durability=commit", "async_rl.max_staleness=1", "async_rl.order=ready_first"),
            "async_rl.order",
        ),
    ],
)
def test_a_plan_refuses_what_a_run_refuses_of_the_data_plane(folder, settings, key):
    planned = plan.make_plan(load_config([f"model.path={folder}", *settings]), PluginPolicy())
    assert planned.refused
    assert any(key in found.text for found in planned.checks if found.level == "error")


@pytest.mark.parametrize(
    ("tied", "settings", "key"),
    [
        (True, ("megatron.pipeline_model_parallel_size=2",), "megatron.pipeline_model_parallel_size"),
        (False, ("megatron.pipeline_model_parallel_size=3",), "megatron.pipeline_model_parallel_size"),
        (True, ("megatron.pipeline_model_parallel_size=2", "lora.rank=4"), ""),
        (False, ("megatron.pipeline_model_parallel_size=2",), ""),
    ],
)
def test_a_plan_refuses_a_layout_that_the_model_does_not_have(folder, tied, settings, key, tmp_path):
    config = Qwen2Config.from_pretrained(folder, num_hidden_layers=2, layer_types=None, tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    planned = plan.make_plan(
        load_config([f"model.path={tmp_path}", "model_engine=megatron", *settings]), PluginPolicy()
    )
    refused = [found.text for found in planned.checks if found.level == "error"]
    assert len(refused) == bool(key)
    assert all(key in text for text in refused)


@pytest.mark.parametrize("setting", ["trainer.hooks=nohook", "trainer.logger=nologger"])
def test_a_plan_refuses_plug_ins_that_a_run_refuses(folder, setting):
    planned = plan.make_plan(load_config([f"model.path={folder}", setting]), PluginPolicy())
    assert [found.text.partition(" ")[0] for found in planned.checks if found.level == "error"] == [
        setting.partition("=")[0]
    ]
