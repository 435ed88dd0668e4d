"""Rows with images: accepted forms, bad rows, and prompt lengths."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Image
from PIL import Image as PIL
from tokenizers import Tokenizer, models

from rl_protocol import ConfigError, SchemaError
from rl_trainer.data.chat_template import PromptEncoder
from rl_trainer.data.images import Vision, decoded, parse_images
from rl_trainer.data.prompt_files import open_files
from rl_trainer.data.prompt_preparation import DataFiles
from rl_trainer.data.validation_split import Subset


@pytest.fixture(scope="module")
def model(make_vision_model):
    return make_vision_model()


@pytest.fixture(scope="module")
def encoder(model):
    return PromptEncoder.load(model)


def png(width=16, height=8, colour=(255, 0, 0), form="PNG"):
    file = io.BytesIO()
    PIL.new("RGB", (width, height), colour).save(file, form)
    return file.getvalue()


def row(images, text="<image>what", **changes):
    return {
        "prompt": [{"role": "user", "content": text}],
        "data_source": "colours",
        "reward_model": {"style": "rule", "ground_truth": "r"},
        "images": images,
    } | changes


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def opened(encoder, path, **settings):
    files = DataFiles(paths=(path,), **({"max_prompt_length": 64} | settings))
    return open_files(files, encoder, path.parent / "cache")


USER, START, PIECE, END, ASSISTANT = 5, 2, 3, 4, 6


def letters(text):
    return [7 + ord(c) - ord("a") for c in text]


# -- accepted forms
@pytest.mark.parametrize("form", ["path", "relative", "file url", "struct", "image", "data url"])
def test_the_forms_of_an_image_in_jsonl(tmp_path, encoder, form):
    (tmp_path / "red.png").write_bytes(png())
    path = str(tmp_path / "red.png")
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    image = {
        "path": path,
        "relative": "red.png",
        "file url": f"file://{path}",
        "struct": {"bytes": None, "path": path},
        "image": {"image": "red.png"},
        "data url": {"image": url},
    }[form]
    data = opened(encoder, write_jsonl(tmp_path / "a.jsonl", [row([image])]))
    # an image of 16 x 8 pixels is two tokens
    assert list(data[0].prompt_ids) == [USER, START, PIECE, PIECE, END, *letters("what"), ASSISTANT]
    (name,) = data[0].images
    assert (name == path) == (form != "data url")
    assert Path(name).read_bytes() == png()


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_images_as_hugging_face_stores_them(tmp_path, encoder, kind):
    rows = [
        row([{"bytes": png(), "path": None}, {"bytes": png(16, 16), "path": "b.png"}], "a<image>b<image>"),
        row([{"bytes": png(), "path": None}]),
    ]
    path = tmp_path / f"d.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        Dataset.from_list(rows).cast_column("images", [Image()]).save_to_disk(str(path))
    data = opened(encoder, path)
    ids = [USER, *letters("a"), START, PIECE, PIECE, END, *letters("b"), START, *[PIECE] * 4, END, ASSISTANT]
    assert list(data[0].prompt_ids) == ids
    first, second = data[0].images
    assert data[1].images == (first,)  # equal images are stored once
    assert decoded(Path(second).read_bytes(), "it").size == (16, 16)
    assert (data.report.images, data.longest) == (3, len(ids))
    assert data.most_image_tokens == Subset(data, np.arange(1)).most_image_tokens == ids.count(encoder.vision.token)


def test_rows_with_and_without_images_lie_in_one_file(tmp_path, encoder):
    (tmp_path / "a.png").write_bytes(png())
    rows = [row(None, "abc"), row([], "abc"), row(["a.png"]), row(None, "a<image>b")]
    data = opened(encoder, write_jsonl(tmp_path / "a.jsonl", rows))
    assert [len(data[i].images) for i in range(4)] == [0, 0, 1, 0]
    assert list(data[0].prompt_ids) == list(data[1].prompt_ids) == [USER, *letters("abc"), ASSISTANT]


@pytest.mark.parametrize(
    "size", [(8, 8), (1, 1), (3, 17), (16, 16), (300, 10), (640, 480), (11, 12), (4, 4), (12, 20), (200, 1)]
)
def test_lengths_are_those_of_transformers(model, encoder, size):
    from transformers import AutoImageProcessor

    made = AutoImageProcessor.from_pretrained(model)(images=[PIL.new("RGB", size)], return_tensors="np")
    tokens = encoder.vision.tokens(*size)
    assert tokens == made["image_grid_thw"].prod() // 4 == len(made["pixel_values"]) // 4
    assert made["pixel_values"].nbytes == tokens * encoder.vision.token_bytes


def test_prompts_with_images_are_those_of_transformers(model, encoder, tmp_path):
    """The processor is made without its constructor, which requires torchvision for videos."""
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

    tokenizer = AutoTokenizer.from_pretrained(model)
    processor = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
    processor.image_processor, processor.tokenizer = AutoImageProcessor.from_pretrained(model), tokenizer
    processor.image_token = "<|image_pad|>"
    images = [PIL.new("RGB", size) for size in ((16, 8), (24, 24))]
    inputs = processor.image_processor(images=images, return_tensors="pt")
    content = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "what"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    for i in range(2):
        text = text.replace("<|image_pad|>", "@" * int(inputs["image_grid_thw"][i].prod() // 4), 1)
        assert processor.replace_image_token(inputs, i) == "<|image_pad|>" * text.count("@")
        text = text.replace("@", "<|placeholder|>")
    expected = tokenizer(text.replace("<|placeholder|>", "<|image_pad|>"))["input_ids"]
    for i, image in enumerate(images):
        image.save(tmp_path / f"{i}.png")
    data = opened(encoder, write_jsonl(tmp_path / "a.jsonl", [row(["0.png", "1.png"], "<image>and<image>what")]))
    assert list(data[0].prompt_ids) == expected


# -- what is refused
def test_images_for_a_model_that_reads_text_alone_end_the_run_and_it_is_named(tmp_path, model_path):
    (tmp_path / "a.png").write_bytes(png())
    path = write_jsonl(tmp_path / "a.jsonl", [row(None), row(["a.png"])])
    for policy in ("error", "skip"):
        with pytest.raises(
            ConfigError,
            match=rf"a\.jsonl, row 2 has images, and {model_path} \(Qwen2ForCausalLM\) reads only text\. Set PromptEncoder\.vision",
        ):
            opened(PromptEncoder.load(model_path), path, on_bad_row=policy)


def test_a_model_with_unsupported_images_is_named(tmp_path, model):
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    config = json.loads((model / "config.json").read_text()) | {"model_type": "llava", "architectures": ["Llava"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"\(Llava\) is not a model of qwen2_vl, qwen2_5_vl"):
        opened(PromptEncoder.load(tmp_path), write_jsonl(tmp_path / "a.jsonl", [row(["a.png"])]))
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json"):
        PromptEncoder.load(tmp_path)


BAD = {
    "two placeholders": (
        lambda: row(["a.png"], "<image><image>"),
        "it does so 2 times, images: 1",
    ),
    "none": (lambda: row(["a.png"], "what"), "it does so 0 times, images: 1"),
    "no images": (lambda: row([]), "it does so 1 times, images: 0"),
    "missing": (lambda: row(["b.png"]), r"image 1 \(.*b\.png\) can't be read: No such file"),
    "a folder": (lambda: row(["."]), r"image 1 \(.*\) can't be read: Is a directory"),
    "a text": (
        lambda: row(["t.txt"]),
        r"image 1 \(.*t\.txt\) is not a whole image \(BMP, GIF, JPEG, PNG, WEBP\): cannot identify",
    ),
    "cut off": (lambda: row(["a.png", "cut.png"], "<image><image>"), r"image 2 \(.*cut\.png\) is not a whole image"),
    "thin": (lambda: row(["thin.png"]), r"402 x 2 pixels, one side more than 200 times the other"),
    "large": (lambda: row(["large.png"]), r"large\.png\) has 9000 x 8000 pixels, more than 67108864"),
    "a url": (
        lambda: row(["https://x.example/a.png"]),
        r"image 1 is 'https://x.example/a.png'; images are read from files",
    ),
    "no such user": (
        lambda: row(["~no-such-user/a.png"]),
        "image 1 is '~no-such-user/a.png', and that user has no home",
    ),
    "null byte": (lambda: row(["a\0.png"]), r"image 1 is 'a\\x00\.png'; no path has a null byte"),
    "a number": (lambda: row([3]), r"image 1 must be .* got '3'"),
    "no list": (lambda: row("a.png"), "images must be a list; got str"),
    "empty": (lambda: row([{"bytes": None, "path": None}]), "image 1 must be"),
    "bad url": (lambda: row(["data:image/png;base64,@@"]), "image 1 is a data URL that can't be read"),
    "url without data": (
        lambda: row(["data:image/png"]),
        "image 1 is a data URL that can't be read: it does not begin",
    ),
    "image token": (
        lambda: row(["a.png"], "<image><|image_pad|>"),
        "one image token for each image; tokens: 2, images: 1",
    ),
    "token alone": (lambda: row(None, "<|image_pad|>"), "one image token for each image; tokens: 1, images: 0"),
    "long": (lambda: row(["big.png"]), "the prompt has 24 tokens, more than DataFiles.max_prompt_length=20"),
    "videos": (lambda: row(None, videos=["a.mp4"]), "it has videos, which are not supported yet"),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "big.png").write_bytes(png(32, 32))
    (tmp_path / "thin.png").write_bytes(png(402, 2))
    PIL.new("1", (9000, 8000)).save(tmp_path / "large.png")
    (tmp_path / "cut.png").write_bytes(png(64, 64)[:-30])
    (tmp_path / "t.txt").write_text("hello")
    return tmp_path


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_by_file_row_and_image(folder, encoder, name):
    make, reason = BAD[name]
    path = write_jsonl(folder / "a.jsonl", [row(["a.png"]), make()])
    data = opened(encoder, path, max_prompt_length=20, filter_overlong_prompts=False, on_bad_row="skip")
    assert (data.report.rows, data.report.bad, data.report.images) == (1, 1, 1)
    (said,) = data.report.bad_rows
    assert said.startswith(f"{path}, row 2: ")
    assert re.search(reason, said), said
    with pytest.raises(ConfigError, match=r"1 bad row: .*DataFiles\.on_bad_row=skip"):
        opened(encoder, path, max_prompt_length=20, filter_overlong_prompts=False)


def test_without_a_chat_template_nothing_says_how_an_image_is_written(folder, encoder):
    bare = PromptEncoder(Tokenizer(models.WordLevel({"x": 0}, unk_token="x")), vision=encoder.vision)
    with pytest.raises(ConfigError, match="the prompt has images, but the tokenizer has no chat template"):
        opened(bare, write_jsonl(folder / "a.jsonl", [row(["a.png"])]))


@pytest.mark.parametrize("form", ["BMP", "GIF", "JPEG", "PNG", "WEBP"])
def test_damaged_images_are_never_anything_but_bad(form):
    rng = np.random.default_rng(0)
    file = io.BytesIO()
    PIL.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8)).save(file, form)
    whole, bad = file.getvalue(), 0
    assert decoded(whole, "it").size == (30, 20)
    for _ in range(150):
        data = bytearray(whole[: rng.integers(len(whole))] if rng.random() < 0.3 else whole)
        for place in rng.integers(0, max(len(data), 1), 5) if data else ():
            data[place] = rng.integers(256)
        try:
            decoded(bytes(data), "it")
        except SchemaError:
            bad += 1
    assert bad > 30


def test_a_data_url_and_bytes_are_the_same_image():
    (one,), (two,) = parse_images(["data:;base64,YWI="]), parse_images([{"bytes": b"ab", "path": "x"}])
    assert one == two
    assert parse_images(None) is None
    assert parse_images([]) == ()


def test_how_an_image_is_cut_is_part_of_what_prompts_depend_on(tmp_path, model, encoder):
    (tmp_path / "big.png").write_bytes(png(32, 32))
    path = write_jsonl(tmp_path / "a.jsonl", [row(["big.png"])])
    vision = Vision(token=PIECE, patch_size=8, merge_size=2, min_pixels=64, max_pixels=1024)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    coarse = PromptEncoder(tokenizer, (model / "chat_template.jinja").read_text(), vision=vision)
    assert [opened(one, path)[0].prompt_ids.count(PIECE) for one in (encoder, coarse)] == [16, 4]


def test_text_is_read_without_pillow(tmp_path, model):
    """Without Pillow, rows of text are read and rows with images say what to install."""
    (tmp_path / "a.png").write_bytes(png())
    write_jsonl(tmp_path / "text.jsonl", [row(None)])
    write_jsonl(tmp_path / "images.jsonl", [row(["a.png"])])
    code = """
import sys
from pathlib import Path
sys.modules["PIL"] = None
from rl_trainer.data.chat_template import PromptEncoder
from rl_trainer.data.prompt_preparation import DataFiles
from rl_trainer.data.prompt_files import open_files
from rl_protocol import ConfigError
here, encoder = Path(sys.argv[1]), PromptEncoder.load(Path(sys.argv[2]))
print(len(open_files(DataFiles(paths=(here / "text.jsonl",), max_prompt_length=50), encoder, here / "cache")))
try:
    open_files(DataFiles(paths=(here / "images.jsonl",), max_prompt_length=50), encoder, here / "cache")
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(model)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env=os.environ,
    )
    assert done.stdout.splitlines() == ["1", "Rows with images need Pillow: install rl-trainer[images]."]
