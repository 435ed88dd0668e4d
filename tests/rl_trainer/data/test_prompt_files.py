"""Prompts from files: formats, errors by file and row, memory use."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import subprocess
import sys
import time

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from prompt_rows import ALPHABET, TEMPLATE, characters, row

from rl_protocol import ConfigError, OutputError, SchemaError
from rl_trainer import Mixture, PromptOrder
from rl_trainer.data.chat_template import PromptEncoder
from rl_trainer.data.prompt_files import open_files
from rl_trainer.data.prompt_preparation import DataFiles, file_digest
from rl_trainer.data.prompt_rows import parse_row


@pytest.fixture
def encoder():
    return PromptEncoder(characters())


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def files(*paths, **settings):
    return DataFiles(paths=paths, **({"max_prompt_length": 50} | settings))


def text_of(prompt):
    return characters().decode(list(prompt.prompt_ids))


# -- formats
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_every_kind_of_file_gives_the_same_prompts(tmp_path, encoder, kind):
    rows = [row("1+2="), row("longer prompt", reward_model={"ground_truth": "x"}, ability="math", images=[])]
    path = tmp_path / f"d.{kind}"
    if kind == "jsonl":
        write_jsonl(path, rows)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist([{k: v for k, v in r.items() if k != "images"} for r in rows]), path)
    else:
        Dataset.from_list([{k: v for k, v in r.items() if k != "images"} for r in rows]).save_to_disk(str(path))
    data = open_files(files(path), encoder, tmp_path / "cache")
    assert [text_of(data[i]) for i in range(len(data))] == ["1+2=", "longer prompt"]
    assert (data[0].data_source, data[0].ground_truth, data[0].extra_info) == (
        "sums",
        "3",
        {"index": 7, "split": "train"},
    )
    assert data[1].ground_truth == "x"
    assert (data.report.rows, data.report.bad, data.report.longest) == (2, 0, 13)


def test_files_are_read_in_order_and_the_prompt_may_have_another_name(tmp_path, encoder):
    rows = [row(f"{i}") for i in range(6)]
    for r in rows:
        r["question"] = r.pop("prompt")
    a, b = write_jsonl(tmp_path / "a.jsonl", rows[:4]), write_jsonl(tmp_path / "b.jsonl", rows[4:])
    data = open_files(files(b, a, prompt_key="question"), encoder, tmp_path / "cache")
    assert "".join(text_of(data[i]) for i in range(6)) == "450123"


def test_lines_that_a_windows_program_has_written_are_read(tmp_path, encoder):
    path, rows = tmp_path / "a.jsonl", [row("1+2="), row("3+4=")]
    path.write_bytes(codecs.BOM_UTF8 + "".join(json.dumps(one) + "\r\n" for one in rows).encode() + b"\r\n")
    data = open_files(files(path), encoder, tmp_path / "cache")
    assert [text_of(data[i]) for i in range(len(data))] == ["1+2=", "3+4="]
    path.write_bytes(codecs.BOM_UTF8)
    with pytest.raises(ConfigError, match=r"a\.jsonl"):
        open_files(files(path), encoder, tmp_path / "cache")


TOOL = {"type": "function", "function": {"name": "clock", "parameters": {}}}


def test_a_row_chooses_its_agent_and_only_a_tool_agent_reads_of_tools(tmp_path):
    template = "{% if tools %}{{ tools[0].function.name }} {% endif %}{{ messages[0].content }}"
    encoder = PromptEncoder(characters(), template, tools=[TOOL])
    names = [None, "tool_agent", "single_turn_agent"]
    path = write_jsonl(tmp_path / "a.jsonl", [row("1+1=", agent_name=name) for name in names])
    data = open_files(files(path, session="tool_agent"), encoder, tmp_path / "cache")
    assert [(data[i].agent, text_of(data[i])) for i in range(3)] == [
        ("", "clock 1+1="),
        ("tool_agent", "clock 1+1="),
        ("single_turn_agent", "1+1="),
    ]


@pytest.mark.parametrize(
    ("session", "agent", "why"),
    [
        ("single_turn", "tool_agent", "must be single_turn_agent .*; set RolloutConfig.session=tool_agent"),
        ("tool_agent", "swe_agent", "must be single_turn_agent or tool_agent .* got 'swe_agent'"),
        ("mine", "single_turn_agent", "must be mine with RolloutConfig.session=mine"),
    ],
)
def test_an_agent_that_the_run_has_not_is_refused(tmp_path, encoder, session, agent, why):
    path = write_jsonl(tmp_path / "a.jsonl", [row(), row(agent_name=agent)])
    with pytest.raises(ConfigError, match=f"row 2: agent_name {why}"):
        open_files(files(path, session=session), encoder, tmp_path / "cache")
    for name, known in (("single_turn", "single_turn_agent"), ("mine", "mine")):
        path = write_jsonl(tmp_path / "a.jsonl", [row(agent_name=known)])
        assert len(open_files(files(path, session=name), encoder, tmp_path / "cache")) == 1


def test_a_ground_truth_that_is_no_string_is_json():
    assert parse_row(row(reward_model={"ground_truth": {"target": 24, "numbers": [1, 2]}})).ground_truth == (
        '{"target":24,"numbers":[1,2]}'
    )
    assert parse_row(row(reward_model={"ground_truth": 3})).ground_truth == "3"


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf")])
def test_a_ground_truth_that_is_missing_is_no_text(missing):
    """pandas writes NaN for it, and JSON has no such number."""
    with pytest.raises(SchemaError, match=r"without reward_model, is (null|nan|inf)"):
        parse_row(row(reward_model={"ground_truth": missing}))


def test_prepared_once_and_again_when_something_changed(tmp_path, encoder):
    path, cache = write_jsonl(tmp_path / "a.jsonl", [row("1")]), tmp_path / "cache"
    open_files(files(path), encoder, cache)
    (made,) = cache.iterdir()
    before = (made / "rows.arrow").stat().st_mtime_ns
    open_files(files(path), encoder, cache)
    assert (made / "rows.arrow").stat().st_mtime_ns == before
    write_jsonl(path, [row("1"), row("2")])
    assert len(open_files(files(path), encoder, cache)) == 2
    other = PromptEncoder(characters(), "{{ messages[0]['content'] }}=")
    assert text_of(open_files(files(path), other, cache)[1]) == "2="
    assert len(list(cache.iterdir())) == 3


def test_the_rows_of_each_file_are_counted(tmp_path, encoder):
    a, b = write_jsonl(tmp_path / "a.jsonl", [row("1"), {}]), write_jsonl(tmp_path / "b.jsonl", [row("2")] * 3)
    empty = write_jsonl(tmp_path / "c.jsonl", [{}])
    assert open_files(files(b, empty, a, on_bad_row="skip"), encoder, tmp_path / "cache").rows_of_files == (3, 0, 1)


def test_a_file_that_is_named_twice_has_its_rows_twice(tmp_path, encoder):
    a, b = write_jsonl(tmp_path / "a.jsonl", [row("1")] * 2), write_jsonl(tmp_path / "b.jsonl", [row("2")])
    data = open_files(files(a, b, a), encoder, tmp_path / "cache")
    assert data.rows_of_files == (2, 1, 2)
    order = PromptOrder(len(data), 5, seed=0, curriculum=Mixture(data.rows_of_files, [0, 0, 1]))
    assert {text_of(data[i]) for i in order.take(0, 5)} == {"1"}


def test_the_digest_of_a_file_follows_its_content_alone(tmp_path, encoder):
    a, b = write_jsonl(tmp_path / "a.jsonl", [row("1")]), write_jsonl(tmp_path / "b.jsonl", [row("2")])
    cache = tmp_path / "cache"
    expected = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (b, a)]
    assert [*open_files(files(b, a), encoder, cache).digests_of_files] == expected
    os.utime(a, (1, 1))
    assert [*open_files(files(b, a), encoder, cache).digests_of_files] == expected
    write_jsonl(a, [row("3")])
    same, other = open_files(files(b, a), encoder, cache).digests_of_files
    assert same == expected[0]
    assert other == hashlib.sha256(a.read_bytes()).hexdigest() != expected[1]


def test_the_digest_of_a_folder_follows_names_and_contents(tmp_path):
    digests = set[str]()
    for name, content in (("x", "1"), ("x", "2"), ("y", "1")):
        folder = tmp_path / f"{name}{content}"
        folder.mkdir()
        (folder / name).write_text(content)
        digests |= {file_digest(folder), file_digest(folder)}
    assert len(digests) == 3


# -- bad rows and files
BAD_LINES = {
    2: (b'{"prompt": []', "not JSON in UTF-8"),
    3: (
        json.dumps({"data_source": "s"}).encode(),
        "missing fields: prompt (DataFiles.prompt_key), reward_model or ground_truth (DataFiles.ground_truth_key); "
        "fields found: data_source",
    ),
    4: (json.dumps(row(prompt=12)).encode(), "Expected `array`, got `int` - at `$.prompt` (DataFiles.prompt_key)"),
    5: (json.dumps(row(prompt=[])).encode(), "the prompt is empty"),
    6: (json.dumps(row(" ")).encode(), "the prompt is empty"),
    7: (json.dumps(row()).replace("sums", "s\\ud800").encode(), "not JSON in UTF-8"),
    8: (json.dumps(row()).encode().replace(b"sums", b"s\xff\xfe"), "not JSON in UTF-8"),
    9: (json.dumps(row(reward_model={"style": "rule"})).encode(), "missing required field `ground_truth`"),
    10: (
        json.dumps(row(reward_model={"ground_truth": None})).encode(),
        "ground_truth, or ground_truth without reward_model, is null",
    ),
    11: (json.dumps(row(data_source=3)).encode(), "Expected `str`, got `int` - at `$.data_source`"),
    12: (json.dumps(row(videos=["a.mp4"])).encode(), "videos, which are not supported yet"),
    19: (
        json.dumps(row(prompt=[{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}])).encode(),
        "message 1 of the prompt has tool_calls, which are not supported yet",
    ),
    13: (b"[1, 2]", "a row must be an object with named fields; got list"),
    14: (json.dumps(row(extra_info="x")).encode(), "Expected `object | null`, got `str` - at `$.extra_info`"),
    15: (b"[" * 5000, "not JSON in UTF-8"),
    16: (
        json.dumps(row(prompt=[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])).encode(),
        "no chat",
    ),
    18: (
        json.dumps(row("x" * 51)).encode(),
        "the prompt has 51 tokens, more than DataFiles.max_prompt_length=50 (DataFiles.filter_overlong_prompts=true leaves it out)",
    ),
}


def bad_file(tmp_path):
    lines = [BAD_LINES.get(i, (json.dumps(row(str(i))).encode(), ""))[0] for i in range(1, 21)]
    lines[16] = b""  # a blank line is not a row
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path


def test_bad_rows_end_the_run_and_each_fault_is_named_by_file_and_row(tmp_path, encoder):
    path = bad_file(tmp_path)
    with pytest.raises(ConfigError) as caught:
        open_files(files(path, filter_overlong_prompts=False), encoder, tmp_path / "cache")
    message = str(caught.value)
    assert message.startswith(f"{len(BAD_LINES)} bad rows: ")
    assert "DataFiles.on_bad_row=skip" in message  # offered because good rows are left
    same = {5: 6}  # the same fault: only the first row is named
    for number, (_, reason) in BAD_LINES.items():
        if number in same.values():
            continue
        (named,) = [part for part in message.split(f"{path}, ") if part.startswith(f"row {number}: ")]
        assert reason in named
    assert f"2 rows, the first {path}, row 5: the prompt is empty; example: " in message
    assert list((tmp_path / "cache").iterdir()) == []  # no partial file is left


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_whose_every_row_lacks_the_same_fields_is_one_line_and_says_what_to_set(tmp_path, encoder, kind):
    rows = [{"question": f"How many are {i} and {i}?", "answer": f"{2 * i}\n#### {2 * i}"} for i in range(50)]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_jsonl(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(ConfigError) as caught:
        open_files(files(path), encoder, tmp_path / "cache")
    assert str(caught.value) == (
        f"50 bad rows: all 50 rows of {path}: missing fields: prompt (DataFiles.prompt_key), "
        "reward_model or ground_truth (DataFiles.ground_truth_key); "
        'fields found: question, answer; example: {"question":"How many are 0 and 0?","answer":"0\\n#### 0"}. '
        "Set DataFiles.prompt_key=question if that field is the prompt. "
        "Set DataFiles.ground_truth_key=answer if that field is the right answer. Fix the files. "
        'A row is {"prompt": [{"role": "user", "content": "..."}], "reward_model": {"ground_truth": "..."}}.'
    )


def test_mixed_faults_are_grouped_with_counts_the_most_frequent_first(tmp_path, encoder):
    rows = [row("1"), *[row("x" * n) for n in range(51, 54)], row(" "), *[{"prompt": "a", "id": i} for i in range(5)]]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError) as caught:
        open_files(files(path, filter_overlong_prompts=False), encoder, tmp_path / "cache")
    assert str(caught.value).startswith(
        f"9 bad rows: 5 rows, the first {path}, row 6: missing fields: "
        f"reward_model or ground_truth (DataFiles.ground_truth_key); fields found: prompt, id; "
        f'example: {{"prompt":"a","id":0}}; 3 rows, the first {path}, row 2: the prompt has 51 tokens, '
        "more than DataFiles.max_prompt_length=50 (DataFiles.filter_overlong_prompts=true leaves it out); "
        f"{path}, row 5: the prompt is empty. Fix the files"
    )
    assert "Set DataFiles.prompt_key" not in str(caught.value)


def test_a_long_row_is_shown_by_its_beginning(tmp_path, encoder):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "x" * 10_000}] * 2)
    with pytest.raises(ConfigError) as caught:
        open_files(files(path), encoder, tmp_path / "cache")
    assert len(str(caught.value)) < 1000


def test_a_file_without_rows_is_named(tmp_path, encoder):
    path = write_jsonl(tmp_path / "a.jsonl", [])
    with pytest.raises(ConfigError, match=r"No usable row in .*a\.jsonl: there are no rows at all\. A row is "):
        open_files(files(path), encoder, tmp_path / "cache")


def test_a_prompt_that_is_a_text_is_one_message_of_the_user(tmp_path):
    encoder = PromptEncoder(characters(), "{{ messages[0]['role'] + '|' + messages[0]['content'] }}")
    path = write_jsonl(tmp_path / "a.jsonl", [row(question="1+2=")])
    data = open_files(files(path, prompt_key="question"), encoder, tmp_path / "cache")
    assert text_of(data[0]) == "user|1+2="


def test_a_prompt_of_another_type_is_named_by_its_field(tmp_path, encoder):
    rows = [row(question="1"), row(question=12), row(question=[{"role": "user"}])]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    data = open_files(files(path, prompt_key="question", on_bad_row="skip"), encoder, tmp_path / "cache")
    assert data.report.bad_rows == (
        f"{path}, row 2: Expected `array`, got `int` - at `$.question` (DataFiles.prompt_key)",
        f"{path}, row 3: Object missing required field `content` - at `$.question[0]` (DataFiles.prompt_key)",
    )


def test_rows_without_reward_model_and_data_source_have_the_answer_in_a_field(tmp_path, encoder):
    rows = [
        {"prompt": "1", "answer": "#### 2"},
        {"prompt": "2", "answer": 3},
        row("3"),
        {"prompt": "4", "answer": None},
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["1", "2"], "answer": [2, 3], "reward_model": pa.nulls(2)}), path)
    lines = write_jsonl(tmp_path / "b.jsonl", rows)
    data = open_files(files(path, lines, ground_truth_key="answer", on_bad_row="skip"), encoder, tmp_path / "cache")
    assert [(data[i].data_source, data[i].ground_truth) for i in range(len(data))] == [
        ("data", "2"),
        ("data", "3"),
        ("data", "#### 2"),
        ("data", "3"),
        ("sums", "3"),
    ]
    assert data.report.bad_rows == (
        f"{lines}, row 4: reward_model.ground_truth, or answer without reward_model, is null",
    )


def test_bad_rows_are_left_out_and_counted(tmp_path, encoder, caplog):
    data = open_files(files(bad_file(tmp_path), on_bad_row="skip"), encoder, tmp_path / "cache")
    assert [text_of(data[i]) for i in range(len(data))] == ["1", "20"]
    # the long prompt is filtered, not bad
    assert (data.report.bad, data.report.overlong) == (len(BAD_LINES) - 1, 1)
    bad, overlong = (record.getMessage() for record in caplog.records)
    assert bad.startswith(f"left out: {len(BAD_LINES) - 1} bad rows: ")
    path = tmp_path / "bad.jsonl"
    assert overlong == f"left out: 1 of 3 prompts in {path}, longer than DataFiles.max_prompt_length=50 tokens"


def test_nothing_is_said_of_files_whose_rows_are_all_used(tmp_path, encoder, caplog):
    open_files(files(write_jsonl(tmp_path / "a.jsonl", [row("1"), row("2")])), encoder, tmp_path / "cache")
    assert caplog.records == []


def test_all_bad_rows_are_counted_and_twenty_faults_named(tmp_path):
    encoder = PromptEncoder(characters(), "{{ raise_exception(messages[0]['role']) }}")
    rows = [row(prompt=[{"role": letter, "content": "x"}]) for letter in ALPHABET[:26]]
    with pytest.raises(ConfigError) as caught:
        open_files(files(write_jsonl(tmp_path / "a.jsonl", rows)), encoder, tmp_path / "cache")
    message = str(caught.value)
    assert message.startswith("26 bad rows: ")
    assert message.count("the chat template rejects the prompt") == 20
    assert "; 6 rows with other faults. " in message


def test_invalid_utf8_in_parquet_is_one_bad_row(tmp_path, encoder):
    texts = pa.array([b"ab", b"\xff\xfe", b"cd"], pa.binary())
    as_text = pa.StringArray.from_buffers(3, texts.buffers()[1], texts.buffers()[2])
    prompts = pa.ListArray.from_arrays(
        [0, 1, 2, 3], pa.StructArray.from_arrays([pa.array(["user"] * 3), as_text], ["role", "content"])
    )
    truth = pa.StructArray.from_arrays([pa.array(["3"] * 3)], ["ground_truth"])
    table = pa.table({"prompt": prompts, "data_source": ["s"] * 3, "reward_model": truth})
    pq.write_table(table, tmp_path / "a.parquet")
    data = open_files(files(tmp_path / "a.parquet", on_bad_row="skip"), encoder, tmp_path / "cache")
    assert [text_of(data[i]) for i in range(2)] == ["ab", "cd"]
    assert data.report.bad_rows[0].startswith(f"{tmp_path / 'a.parquet'}, row 2: its text is not UTF-8")


def test_a_date_that_python_can_not_express_is_one_bad_row(tmp_path, encoder):
    table = pa.Table.from_pylist([row("ab"), row("cd")])
    dates = pa.array([0, 253402300800000], pa.timestamp("ms"))  # the year 10000
    pq.write_table(table.append_column("added", dates), tmp_path / "a.parquet")
    data = open_files(files(tmp_path / "a.parquet", on_bad_row="skip"), encoder, tmp_path / "cache")
    assert (len(data), text_of(data[0])) == (1, "ab")
    assert data.report.bad_rows[0].startswith(f"{tmp_path / 'a.parquet'}, row 2: it has a value that Python can't")


def test_a_truncated_parquet_file_is_named(tmp_path, encoder):
    whole, cut = tmp_path / "whole.parquet", tmp_path / "cut.parquet"
    pq.write_table(pa.Table.from_pylist([row(str(i)) for i in range(50)]), whole)
    cut.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"1 bad row: .*cut\.parquet: not a whole parquet file"):
        open_files(files(cut, whole), encoder, tmp_path / "cache")
    data = open_files(files(cut, whole, on_bad_row="skip"), encoder, tmp_path / "cache")
    assert (len(data), data.report.bad) == (50, 1)


def test_a_parquet_file_that_is_damaged_inside_gives_the_rows_before_and_says_where_it_broke(tmp_path, encoder):
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.Table.from_pylist([row(f"prompt {i}") for i in range(1024)]), path, row_group_size=512, compression="gzip"
    )
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 64] = b"\xaa" * 64
    path.write_bytes(data)
    prompts = open_files(files(path, on_bad_row="skip"), encoder, tmp_path / "cache")
    assert (len(prompts), prompts.report.bad) == (512, 1)
    assert f"{path}, after row 512: not a whole parquet file" in prompts.report.bad_rows[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.jsonl", r"gone\.jsonl can't be read: No such file"),
        ("a.csv", r"a\.csv is not a data file: DataFiles\.paths can be \*\.jsonl"),
    ],
)
def test_files_that_can_not_be_used(tmp_path, encoder, name, message):
    with pytest.raises(ConfigError, match=message):
        open_files(files(tmp_path / name), encoder, tmp_path / "cache")


def test_a_cache_that_can_not_be_written_is_named(tmp_path, encoder):
    path = write_jsonl(tmp_path / "a.jsonl", [row()])
    with pytest.raises(OutputError, match=r"can't be written to .*a\.jsonl/data-.*set open_files\.cache_dir"):
        open_files(files(path), encoder, path)


def test_a_file_of_prompts_that_are_all_too_long(tmp_path, encoder):
    path = write_jsonl(tmp_path / "a.jsonl", [row("x" * 9)])
    with pytest.raises(
        ConfigError, match=r"No usable row in .*: Prompts with more than 8 tokens \(DataFiles\.max_prompt"
    ):
        open_files(files(path, max_prompt_length=8), encoder, tmp_path / "cache")


# -- chat templates
def test_what_a_chat_template_refuses_is_a_bad_row(tmp_path):
    encoder = PromptEncoder(characters(), TEMPLATE, {"eos_token": "<"})
    path = write_jsonl(tmp_path / "a.jsonl", [row(), row(prompt=[{"role": "tool", "content": "x"}])])
    with pytest.raises(ConfigError, match=r"row 2: the chat template rejects the prompt: no tools here"):
        open_files(files(path), encoder, tmp_path / "cache")


# -- time and memory
def test_ten_thousand_rows_are_ready_soon(tmp_path, encoder):
    path = write_jsonl(tmp_path / "a.jsonl", [row(f"{i} + {i} = " + "x" * 30) for i in range(10_000)])
    start = time.process_time()
    data = open_files(files(path), encoder, tmp_path / "cache")
    batch = [data[i] for i in range(0, 10_000, 40)]
    assert len(batch) == 250
    assert time.process_time() - start < 5


PEAK = """
import sys
from pathlib import Path
from tokenizers import Tokenizer
from rl_trainer import Mixture, PromptOrder
from rl_trainer.data.chat_template import PromptEncoder
from rl_trainer.data.prompt_preparation import DataFiles
from rl_trainer.data.prompt_files import open_files

def resident(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024

folder = Path(sys.argv[1])
encoder = PromptEncoder(Tokenizer.from_file(str(folder / "tokenizer.json")))
before, mapped = resident("VmRSS"), resident("RssFile")
data = open_files(DataFiles(paths=(folder / "big.parquet",), max_prompt_length=10_000), encoder, folder / "cache")
for i in range(len(data)):
    data[i * 7919 % len(data)]
print(resident("RssAnon"), resident("RssFile") - mapped, resident("VmHWM"), before, len(data))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    """Read a file of 160 MB with one row group in a separate process, then all its rows.

    The process may hold its code and one batch.
    """
    characters().save(str(tmp_path / "tokenizer.json"))
    rows = [row(f"{i}", extra_info={"noise": os.urandom(4500).hex()}) for i in range(18_000)]
    pq.write_table(
        pa.Table.from_pylist(rows),
        tmp_path / "big.parquet",
        row_group_size=len(rows),
        use_dictionary=False,
        compression="none",
    )
    size = (tmp_path / "big.parquet").stat().st_size / 2**20
    assert size > 150
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )
    anonymous, mapped, peak, before, count = (float(number) for number in done.stdout.split())
    assert count == len(rows)
    assert peak < 500
    assert anonymous < before + 80  # nothing of the file stays in memory
    assert mapped < 100  # nor do the mapped pages of the prepared file, which is as long


def test_the_facts_of_a_prepared_file_can_be_read_by_others(tmp_path, encoder):
    open_files(files(write_jsonl(tmp_path / "a.jsonl", [row("1")])), encoder, tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    assert msgspec.json.decode((folder / "report.json").read_bytes())["rows"] == 1
