"""Measure the time to the first batch and the memory that a large data file takes.

    uv run benchmarks/bench_data_files.py [--rows N] [--mib N] [--row-group-mib N,0] [--repeats N]
        [--smoke]

Each file is read by a separate process as a worker of a run reads it: rows are checked, tokenized
and written to an Arrow file, and every prompt is taken once in shuffled order. For JSONL of 10,000
rows it reports the seconds from process start, imports included, to the first batch. For 1 GiB of
uncompressed Parquet, in row groups of 16 MiB and in a single one (0), it reports the peak resident
memory of the process (VmHWM), which includes code and mapped files.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.pairs import publish, verdict

BATCH = 1024
PROMPT_CHARACTERS = 4096
WORDS = 1000
SMALL = 200
"""Characters of a prompt in the file of many rows."""


def words() -> list[str]:
    """[WORDS] words of three to nine letters, the same in every run."""
    rng = random.Random(0)
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9))) for _ in range(WORDS)]


def texts(count: int, characters: int) -> Iterator[str]:
    """Prompts of random words, all different."""
    rng = random.Random(1)
    long = " ".join(rng.choices(words(), k=200_000))
    for i in range(count):
        start = rng.randrange(len(long) - characters)
        yield f"{i} {long[start : start + characters]}"


def write_jsonl(path: Path, rows: int) -> None:
    """Write a file of `rows` rows in verl's format."""
    with path.open("w", encoding="utf-8") as file:
        for i, text in enumerate(texts(rows, SMALL)):
            row: dict[str, Any] = {"prompt": [{"role": "user", "content": text}], "data_source": "words"}
            row |= {"reward_model": {"style": "rule", "ground_truth": str(i)}, "extra_info": {"index": i}}
            file.write(json.dumps(row) + "\n")


def write_parquet(path: Path, mib: int, row_group_mib: int) -> None:
    """Write a file of at least `mib` MiB; with `row_group_mib=0` in one row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = mib * 2**20 // PROMPT_CHARACTERS
    size = row_group_mib * 2**20 // PROMPT_CHARACTERS or rows

    def table(contents: list[str], first: int) -> Any:
        numbers = range(first, first + len(contents))
        said = pa.StructArray.from_arrays([pa.array(["user"] * len(contents)), pa.array(contents)], ["role", "content"])
        truth = pa.StructArray.from_arrays([pa.array(map(str, numbers))], ["ground_truth"])
        return pa.table(
            {
                "prompt": pa.ListArray.from_arrays(list(range(len(contents) + 1)), said),
                "data_source": ["words"] * len(contents),
                "reward_model": truth,
                "extra_info": pa.StructArray.from_arrays([pa.array(numbers)], ["index"]),
            }
        )

    source, writer = texts(rows, PROMPT_CHARACTERS), None
    for first in range(0, rows, size):
        piece = table([next(source) for _ in range(min(size, rows - first))], first)
        writer = writer or pq.ParquetWriter(path, piece.schema, compression="none", use_dictionary=False)
        writer.write_table(piece, row_group_size=size)
    assert writer is not None, "there is at least one row"
    writer.close()


def resident(name: str) -> float:
    """A line of /proc/self/status, MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def read(path: Path) -> None:
    """Read the file in the measured process; print the time to the first batch and the peak."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from rl_trainer import PromptOrder
    from rl_trainer.data.chat_template import PromptEncoder
    from rl_trainer.data.prompt_files import open_files
    from rl_trainer.data.prompt_preparation import DataFiles

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words(), "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    imported_mib, start = resident("VmHWM"), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        files = DataFiles(paths=(path,), max_prompt_length=PROMPT_CHARACTERS)
        data = open_files(files, PromptEncoder(tokenizer), Path(cache))
        batch = min(BATCH, len(data))
        order = PromptOrder(len(data), batch, seed=0)
        tokens = sum(len(data[row].prompt_ids) for row in order.rows(0))
        print("first batch", flush=True)
        first_s, prepared_mib = time.perf_counter() - start, resident("VmHWM")
        for step in range(1, len(data) // batch):
            tokens += sum(len(data[row].prompt_ids) for row in order.rows(step))
        facts = {
            "rows": len(data),
            "tokens": tokens,
            "prepared_s": first_s,
            "read_s": time.perf_counter() - start - first_s,
            "imported_mib": imported_mib,
            "prepared_mib": prepared_mib,
            "peak_mib": resident("VmHWM"),
            "anonymous_mib": resident("RssAnon"),
        }
    print(json.dumps(facts))


def child(path: Path) -> tuple[float, dict[str, Any]]:
    """(seconds from process start to the first batch, what the process printed)."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--read", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline().strip()
        seconds = time.perf_counter() - start
        said = process.stdout.read()
    if process.returncode or first != "first batch":
        raise RuntimeError(f"the reader ended with {process.returncode}: {first} {said}")
    return seconds, {key: float(f"{value:.4g}") for key, value in json.loads(said).items()}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000, help="of the JSONL file")
    parser.add_argument("--mib", type=int, default=1024, help="of the parquet file")
    parser.add_argument("--row-group-mib", default="16,0", help="sizes of row groups, one file each; 0: a single one")
    parser.add_argument("--repeats", type=int, default=3, help="of the JSONL file")
    parser.add_argument("--read", type=Path, help="read this file: what the processes that are measured do")
    parser.add_argument("--smoke", action="store_true", help="tiny, and nothing is written")
    args = parser.parse_args()
    if args.read is not None:
        read(args.read)
        return
    if args.smoke:
        args.rows, args.mib, args.row_group_mib, args.repeats = 200, 2, "0", 1
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        write_jsonl(path, args.rows)
        measured = [child(path) for _ in range(args.repeats)]
        seconds = statistics.median(first for first, _ in measured)
        prepared = statistics.median(facts["prepared_s"] for _, facts in measured)
        question = f"data: seconds from the start of a process to its first batch, {args.rows} rows of JSONL"
        rows.append(verdict(question, seconds, 5.0, 2.5, at_least=False, without_imports_s=prepared))
        for size in map(int, args.row_group_mib.split(",")):
            path = Path(folder, "rows.parquet")
            write_parquet(path, args.mib, size)
            _, facts = child(path)
            groups = f"in row groups of {size} MiB" if size else "in one row group"
            question = f"data: MiB of resident memory at most, parquet of {args.mib} MiB {groups}"
            file_mib = path.stat().st_size / 2**20
            rows.append(verdict(question, facts["peak_mib"], 500, 300, at_least=False, file_mib=file_mib, **facts))
    if not args.smoke:
        publish("data", rows)


if __name__ == "__main__":
    main()
