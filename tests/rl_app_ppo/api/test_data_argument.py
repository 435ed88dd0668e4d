"""Rows become files as the command line reads them; wrong rows are refused before that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_app_ppo.api.data_argument import check_data, data_files
from rl_protocol import ConfigError

ROWS = [
    {"prompt": "1+2=", "data_source": "sums", "reward_model": {"ground_truth": "3"}},
    {"prompt": "2+2=", "data_source": "sums", "reward_model": {"ground_truth": "4"}},
]


@pytest.mark.parametrize("data", ["0.5*a.jsonl,0.5*b.jsonl", ["0.5*a.jsonl", "0.5*b.jsonl"]])
def test_files_keep_their_spelling(data, tmp_path: Path):
    check_data("train_dataset", data)
    assert data_files("train_dataset", data, tmp_path) == "0.5*a.jsonl,0.5*b.jsonl"


def test_a_path_is_a_file(tmp_path: Path):
    check_data("train_dataset", tmp_path / "a.jsonl")
    assert data_files("train_dataset", tmp_path / "a.jsonl", tmp_path) == str(tmp_path / "a.jsonl")


def test_rows_are_written_as_they_are(tmp_path: Path):
    check_data("train_dataset", ROWS)
    file = data_files("train_dataset", ROWS, tmp_path)
    assert [json.loads(line) for line in Path(file).read_text().splitlines()] == ROWS
    assert data_files("val_dataset", list(ROWS), tmp_path) == file, "equal rows have one file, so a run can be resumed"


def test_without_a_cache_the_argument_stands_for_its_file():
    assert data_files("val_dataset", ROWS, None) == "val_dataset"


def test_a_hugging_face_data_set_is_written_as_parquet(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    check_data("train_dataset", rows)
    file = data_files("train_dataset", rows, tmp_path)
    assert datasets.Dataset.from_parquet(file, cache_dir=str(tmp_path / "hf")).to_list() == ROWS
    assert data_files("train_dataset", datasets.Dataset.from_list(ROWS), tmp_path) == file


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "train_dataset is empty"),
        (3, "train_dataset must be a file, .*got int"),
        ({"prompt": ["1+2="]}, "train_dataset must be .*got dict"),
        (iter(ROWS), "train_dataset must be .*got list_iterator"),
        ([*ROWS, "a.jsonl"], r"train_dataset\[2\] must be a row \(a dict\); got str"),
        (["a.jsonl", ROWS[0]], r"train_dataset\[1\] must be a file"),
        ([{"prompt": object()}], r"train_dataset\[0\] can't be written as JSON: Object of type object"),
        ([{"prompt": float("nan")}], r"train_dataset\[0\] can't be written as JSON"),
        (["a,b.jsonl"], "has a comma"),
        (Path("a,b.jsonl"), "has a comma"),
    ],
)
def test_wrong_data_is_refused(data, words):
    with pytest.raises(ConfigError, match=words):
        check_data("train_dataset", data)
