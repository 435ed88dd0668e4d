"""What holds for every test, however and on whatever machine pytest was started."""

from __future__ import annotations

import gc
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Property tests run on shared machines: how long one example takes says nothing. At a desk every run looks for new counter-examples;
# in CI the examples are the same for the same code, so that a red run is about the change and can be repeated.
settings.register_profile(
    "shared", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared")

# Ray's workers run in the environment of the tests. Where pytest was started by `uv run`, Ray would have uv make one for each of them, which takes
# a minute; it looks at this when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# A shell starts its background jobs with SIGINT ignored, and so would be every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each of these markers belongs to an environment of its own: a test with two would run where one of them can't."""
    for item in items:
        if (
            len(
                asked := [
                    name for name in ("slow", "nightly", "gpu", "vllm", "bridge") if item.get_closest_marker(name)
                ]
            )
            > 1
        ):
            raise pytest.UsageError(
                f"{item.nodeid} is marked {' and '.join(asked)}: leave the one that says where it can run."
            )


@pytest.fixture(autouse=True)
def _contexts_of_vllm(request: pytest.FixtureRequest) -> Iterator[None]:
    """An engine of vLLM's that did not start leaves its ZeroMQ context to the garbage collector, which warns of it: here, not in a later test.

    What was there before the test is not searched: with vLLM imported, that alone takes most of a second.
    """
    if not request.node.get_closest_marker("vllm"):
        yield
        return
    gc.freeze()
    yield
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unclosed context", ResourceWarning)
        gc.collect()
    gc.unfreeze()


@pytest.fixture(scope="session")
def demo_models(request):
    """Folder of demo models that were made by an earlier test or an earlier run of pytest: see rl_app_ppo.demo.store for when one is made anew."""
    return request.config.cache.mkdir("demo_models")


@pytest.fixture(scope="session")
def base_model(demo_models):
    """A demo model after a warm-up of a few steps: enough to train on, quick to make."""
    from rl_app_ppo.demo.settings import WarmUpSettings
    from rl_app_ppo.demo.warmup import cached_base_model

    return cached_base_model(demo_models, WarmUpSettings(max_steps=80, check_every=80, validation_size=64))


@pytest.fixture
def install_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """(group, name="module:attribute", ...) -> as an installer does it: entry points of one more distribution, `someones1` 1.0, `someones2` ..., and,
    unless allowed=False, as an operator does it: what RL_PLUGINS names allows them. Returns the folder that holds it."""
    from rl_trainer.algorithms.registry import installed

    monkeypatch.delenv("RL_PLUGINS", raising=False)
    count = 0

    def install(group: str, *, allowed: bool = True, **points: str) -> Path:
        nonlocal count
        count += 1
        distribution, site = f"someones{count}", tmp_path / f"site-{count}"
        info = site / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        offered = "".join(f"{name} = {value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{offered}")
        monkeypatch.syspath_prepend(site)
        if allowed:
            with (tmp_path / "plugins.toml").open("a") as file:
                file.writelines(f'[{group}.{name}]\ndistribution = "{distribution}"\n' for name in points)
            monkeypatch.setenv("RL_PLUGINS", str(tmp_path / "plugins.toml"))
        installed.cache_clear()
        return site

    yield install
    installed.cache_clear()


@pytest.fixture(scope="session")
def readme_code() -> Callable[[str, int], str]:
    """(member's folder from the root, number) -> that python block of the member's README."""

    def read(member: str, number: int) -> str:
        text = (Path(__file__).parents[1] / member / "README.md").read_text(encoding="utf-8")
        return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)[number]

    return read


SIGHTED = ("<pad>", "<eos>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|user|>", "<|assistant|>")
SIGHTED_TEMPLATE = """{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>' }}"""


@pytest.fixture(scope="session")
def make_vision_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """family -> folder of a real Qwen2-VL or Qwen2.5-VL of some ten thousand parameters over 33 tokens, its tokenizer, and its image processor, for
    which 8 x 8 pixels are a token."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.utils import logging

    logging.disable_progress_bar()

    def make(family: str = "qwen2_vl") -> Path:
        path = tmp_path_factory.mktemp(family)
        words = {word: i for i, word in enumerate([*SIGHTED, *"abcdefghijklmnopqrstuvwxyz"])}
        core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
        core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        core.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=list(SIGHTED[2:])
        )
        tokenizer.chat_template = SIGHTED_TEMPLATE
        tokenizer.save_pretrained(path)
        sight = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
        if family == "qwen2_vl":
            sight |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
        else:
            sight |= {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "window_size": 16}
            sight |= {"fullatt_block_indexes": [1]}
        config = AutoConfig.for_model(
            family,
            text_config={
                "vocab_size": len(words),
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
                "initializer_range": 0.1,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
                "pad_token_id": 0,
                "eos_token_id": 1,
                "bos_token_id": None,
            },
            vision_config=sight,
            vision_start_token_id=2,
            image_token_id=3,
            vision_end_token_id=4,
            video_token_id=32,  # never shown
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForImageTextToText.from_config(config).save_pretrained(path)
        sizes = {"shortest_edge": 64, "longest_edge": 1024}
        Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=sizes).save_pretrained(path)
        return path

    return make
