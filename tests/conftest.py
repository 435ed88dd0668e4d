"""Settings and fixtures for all tests."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from nightly_record import NightlyRecord
from process_settings import seed_all, settings_kept

sys.path[1:1] = [f"{sys.path[0]}/{folder}" for folder in ("devices", "models", "runs")]

# Property tests run on shared machines, where the time of one example says nothing: no deadline.
# Locally, each run tries new examples; in CI the examples depend only on the code, so that a
# failure comes from the change and can be repeated.
settings.register_profile(
    "shared", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared")

# Ray workers use the environment of the tests. Without this setting, Ray under `uv run` creates an
# environment for each worker, which takes a minute. Ray reads it on import.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# Tests share the cores with each other and with the processes they start. Torch threads spin while
# they wait, and with few cores a batch of these small models then takes five to ten times the CPU
# time. Child processes inherit both variables, and torch reads them on import. The app sets the
# number of threads of its workers itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts background jobs with SIGINT ignored. Processes that a test starts and interrupts
# would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


EXCLUSIVE = ("slow", "nightly", "gpu", "vllm", "bridge")
"""Markers that say where or when a test runs."""


def pytest_configure(config: pytest.Config) -> None:
    """Record the results of `-m nightly`, in the process that reports them."""
    if config.option.markexpr == "nightly" and not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(NightlyRecord())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files that never name the marker of `-m slow` or `-m "numeric and ..."`.

    `_check_markers` ensures that every file names the markers of its tests, so that no test is
    missed.
    """
    wanted = re.match(r"(?!not\b)(\w+)(?: and |$)", config.option.markexpr)
    if wanted is None or not collection_path.match("test_*.py"):
        return None
    return True if f"mark.{wanted[1]}" not in collection_path.read_text(encoding="utf-8") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _check_markers(items)
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        _put_long_files_first(items)


def _check_markers(items: list[pytest.Item]) -> None:
    """Check that a test has at most one exclusive marker and that its file names its markers."""
    texts: dict[Path, str] = {}
    for item in items:
        asked = [name for name in EXCLUSIVE if item.get_closest_marker(name)]
        if len(asked) > 1:
            raise pytest.UsageError(
                f"{item.nodeid} is marked {' and '.join(asked)}: leave the one that says where it can run."
            )
        if item.get_closest_marker("numeric"):
            asked.append("numeric")
        for name in asked:
            if item.path not in texts:
                texts[item.path] = item.path.read_text(encoding="utf-8")
            if f"mark.{name}" not in texts[item.path]:
                raise pytest.UsageError(f"{item.nodeid} is marked {name}: write pytest.mark.{name} in its own file.")


def _put_long_files_first(items: list[pytest.Item]) -> None:
    """Sort files by the longest timeout of their tests, longest first.

    A long file that starts last would leave the other workers idle.
    """
    longest: dict[Path, float] = {}
    for item in items:
        timeout = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0.0), float(timeout.args[0]) if timeout else 0.0)
    items.sort(key=lambda item: -longest[item.path])


@pytest.fixture(autouse=True)
def _process_settings() -> Iterator[None]:
    """Give each test the same seeds, and restore the settings of the process that it changes."""
    with settings_kept():
        seed_all()
        yield


@pytest.fixture(autouse=True)
def _contexts_of_vllm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collect the ZeroMQ contexts that a failed vLLM engine leaves behind, right after its test.

    The garbage collector warns about them and would make a later test fail. Objects from before the
    test are frozen: with vLLM imported, scanning them takes most of a second.
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
    """Folder of demo models, kept between runs of pytest; see rl_app_ppo.demo.cache."""
    return request.config.cache.mkdir("demo_models")


@pytest.fixture(scope="session")
def make_demo_model(demo_models):
    """Return a function from warm-up settings to the folder of that demo model.

    A file lock lets one process make the model while the others wait.
    """
    from rl_app_ppo.demo.warmup import cached_base_model

    def make(settings):
        with demo_models.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return cached_base_model(demo_models, settings)

    return make


@pytest.fixture(scope="session")
def base_model(make_demo_model):
    """Demo model after a short warm-up: good enough to train on and quick to make."""
    from rl_app_ppo.demo.settings import WarmUpSettings

    return make_demo_model(WarmUpSettings(demo="sums", max_steps=140, check_every=140, validation_size=64))


@pytest.fixture
def install_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that installs a distribution with the given entry points.

    It takes the group of the entry points and pairs of `name="module:attribute"`, and returns the
    folder that holds the distribution. The distributions are called `someones1`, `someones2` and so
    on, all of version 1.0. Unless `allowed=False`, it also allows the entry points in the file that
    RL_PLUGINS names, as an operator would.
    """
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
        return site

    return install


@pytest.fixture(scope="session")
def readme_code() -> Callable[..., str]:
    """Return a function that reads one python block of a member's README or another file.

    The block is given by its number, the member by its folder relative to the root.
    """

    def read(member: str, number: int, file: str = "README.md") -> str:
        text = (Path(__file__).parents[1] / member / file).read_text(encoding="utf-8")
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
    """Return a function that makes a tiny Qwen2-VL, Qwen2.5-VL or Qwen3-VL model.

    It takes the family and returns a folder with a real model of some ten thousand parameters and
    33 tokens, its tokenizer, and its image processor, which makes one token of 8 x 8 pixels.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    def make(family: str = "qwen2_vl", hidden: int = 32, heads: int = 4) -> Path:
        half = hidden // heads // 2
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
            sight |= {"embed_dim": 16, "hidden_size": hidden, "mlp_ratio": 2}
        else:
            sight |= {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": hidden}
        if family == "qwen2_5_vl":
            sight |= {"window_size": 16, "fullatt_block_indexes": [1]}
        if family == "qwen3_vl":
            sight |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        config = AutoConfig.for_model(
            family,
            text_config={
                "vocab_size": len(words),
                "hidden_size": hidden,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": heads,
                "num_key_value_heads": heads // 2,
                "head_dim": hidden // heads,
                "max_position_embeddings": 128,
                "initializer_range": 0.1,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [half // 2, half // 4, half // 4],
                    **({"mrope_interleaved": True} if family == "qwen3_vl" else {}),
                },
                "pad_token_id": 0,
                "eos_token_id": 1,
                "bos_token_id": None,
            },
            vision_config=sight,
            vision_start_token_id=2,
            image_token_id=3,
            vision_end_token_id=4,
            video_token_id=32,  # unused
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForImageTextToText.from_config(config).save_pretrained(path)
        sizes = {"shortest_edge": 64, "longest_edge": 1024}
        Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=sizes).save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an untrained Qwen3-MoE model for the demo; two of four experts read each token."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from rl_app_ppo.demo.model import build_tokenizer
    from rl_app_ppo.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCABULARY

    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    folder = tmp_path_factory.mktemp("moe")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
