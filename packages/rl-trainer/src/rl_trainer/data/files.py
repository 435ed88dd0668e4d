"""Prompts from files in verl's row format: checked row by row, made into token ids once, and memory-mapped by every process that wants them.

What was made is kept in a folder per (files, tokenizer, settings): `rows.arrow`, `report.json`, and `images/` for those that rows hold as bytes, by
content; a row names files. The folder appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from rl_protocol import ConfigError, SchemaError
from rl_protocol.durable import write_errors
from rl_protocol.errors import UNREADABLE
from rl_protocol.temporary import sweep, temporary_folder
from rl_trainer.data.bad_rows import ROW_FORMAT, BadRows
from rl_trainer.data.chat import PromptEncoder
from rl_trainer.data.images import FAMILIES, CheckedImage, Vision, check_images, parse_images
from rl_trainer.data.prompts import PromptRow
from rl_trainer.data.rows import Message, VerlRow, parse_row
from rl_trainer.data.tables import BATCH_ROWS, PromptTable, parquet_rows, prompt_writer, saved_rows

logger = logging.getLogger(__name__)
_UNFINISHED = ".unfinished-"
FORMAT = 5
"""Raised whenever the code makes something else of equal files and settings."""
IMAGES = "images"
_READERS = {".csv": "from_csv", ".json": "from_json"}
"""Kinds of files that `datasets` reads, and how."""


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """What to read, and what to do with rows that can't be used."""

    paths: tuple[Path, ...]
    """*.jsonl, *.parquet, or folders written by `datasets.Dataset.save_to_disk`."""
    prompt_key: str = "prompt"
    max_prompt_length: int
    """Tokens."""
    filter_overlong_prompts: bool = True
    """Leave longer prompts out; otherwise they are bad rows."""
    on_bad_row: Literal["error", "skip"] = "error"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the rows."""

    rows: int
    overlong: int
    """Prompts that were left out for their length."""
    bad: int
    """Rows that do not meet the format, and files that end too soon."""
    bad_rows: tuple[str, ...]
    """One line for each fault: how many rows, file and number of the first, and why."""
    longest: int
    """Tokens of the longest prompt."""
    largest_token: int
    """Largest token id of all usable prompts."""
    rows_of_files: tuple[int, ...]
    """Usable rows of each file, in order."""
    images: int
    """Of all usable rows."""

    def __str__(self) -> str:
        return f"{self.bad} bad row{'s' * (self.bad != 1)}: {'; '.join(self.bad_rows)}"


class FilePrompts:
    """A PromptDataset over a prepared folder; holds a memory map, no rows."""

    def __init__(self, folder: Path) -> None:
        self.report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
        self._rows = PromptTable(folder / "rows.arrow")
        self._images = folder.absolute() / IMAGES

    @property
    def rows_of_files(self) -> tuple[int, ...]:
        """Usable rows of each file, in order."""
        return self.report.rows_of_files

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return self.report.longest

    @property
    def largest_token(self) -> int:
        """Largest token id of all prompts."""
        return self.report.largest_token

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> PromptRow:
        fields = self._rows[row]
        return PromptRow(
            prompt_ids=tuple(fields["prompt_ids"]),
            data_source=fields["data_source"],
            ground_truth=fields["ground_truth"],
            extra_info=msgspec.msgpack.decode(fields["extra_info"]),
            images=tuple(str(self._images / name) for name in fields["images"]),
        )


def open_files(files: DataFiles, encoder: PromptEncoder, cache_dir: Path) -> FilePrompts:
    """The prompts of these files, from the cache or made now.

    Raises:
        ConfigError: a file that is not there or of no known kind; bad rows, unless they are to be skipped; no row left.
        OutputError: the cache can't be written.
    """
    folder = cache_dir / f"data-{_fingerprint(files, encoder)[:24]}"
    sweep(_UNFINISHED, cache_dir)
    if not (folder / "report.json").exists():
        with write_errors(folder, "The prompts", "Free some space there, or set model.cache_dir to another place."):
            _publish(folder, files, encoder)
    prompts = FilePrompts(folder)
    if prompts.report.bad:
        logger.warning("%s", prompts.report)
    return prompts


def _publish(folder: Path, files: DataFiles, encoder: PromptEncoder) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(_UNFINISHED, folder.parent) as workshop:
        fresh = workshop / "new"
        fresh.mkdir()
        report = prepare(files, encoder, fresh / "rows.arrow")
        (fresh / "report.json").write_bytes(msgspec.json.encode(report))
        try:
            fresh.rename(folder)
        except OSError:
            if not (folder / "report.json").exists():  # otherwise another process was first
                raise
            shutil.rmtree(fresh)


def prepare(files: DataFiles, encoder: PromptEncoder, target: Path) -> Report:
    """Check all rows and write the usable ones to the Arrow file `target`, and images that came as bytes into a folder beside it.

    Raises:
        ConfigError: as `open_files`.
    """
    tally = _Tally()
    with prompt_writer(target) as writer:
        usable = _usable(files, encoder, tally, target.parent / IMAGES)
        while batch := list(islice(usable, BATCH_ROWS)):
            pairs = _encoded(batch, encoder, tally)
            writer.append([row for one, ids in pairs if (row := _fitted(one, ids, encoder, files, tally)) is not None])
    report = tally.report(files.paths)
    if report.bad and files.on_bad_row == "error":
        raise ConfigError(f"{report}. {tally.bad.remedy(files.prompt_key, can_skip=bool(report.rows))}")
    if not report.rows:
        raise ConfigError(f"No usable row in {', '.join(map(str, files.paths))}: {_why_none(report, files, tally)}")
    return report


def _why_none(report: Report, files: DataFiles, tally: _Tally) -> str:
    said: list[str] = []
    if report.overlong:
        most = files.max_prompt_length
        said.append(f"{report.overlong} prompts have more than {most} tokens (data.max_prompt_length).")
    if report.bad:
        said.append(f"{report}. {tally.bad.remedy(files.prompt_key, can_skip=bool(report.rows))}")
    return " ".join(said) or f"there are no rows at all. A row is {ROW_FORMAT}."


def _encoded(batch: Sequence[_Usable], encoder: PromptEncoder, tally: _Tally) -> Iterator[tuple[_Usable, list[int]]]:
    """Rows with their token ids, but for those that the template refuses."""
    texts = encoder.texts([(one.prompt, bool(one.image_tokens)) for one in batch])
    written: list[tuple[_Usable, str]] = []
    for one, text in zip(batch, texts, strict=True):
        if isinstance(text, SchemaError):
            tally.bad.add(one.path, one.place, text)
        else:
            written.append((one, text))
    return zip((one for one, _ in written), encoder.ids([text for _, text in written]), strict=True)


@dataclass
class _Tally:
    overlong: int = 0
    longest: int = 0
    largest_token: int = 0
    images: int = 0
    rows_of_files: Counter[Path] = field(default_factory=Counter[Path])
    bad: BadRows = field(default_factory=BadRows)

    def report(self, paths: Sequence[Path]) -> Report:
        return Report(
            rows=self.rows_of_files.total(),
            overlong=self.overlong,
            bad=self.bad.count,
            bad_rows=self.bad.lines(),
            longest=self.longest,
            largest_token=self.largest_token,
            rows_of_files=tuple(self.rows_of_files[path] for path in paths),
            images=self.images,
        )


@dataclass(frozen=True, slots=True)
class _Usable:
    """A row that meets the format."""

    path: Path
    place: str
    fields: dict[str, Any]
    """To store."""
    prompt: Sequence[Message]
    image_tokens: tuple[int, ...]
    """Tokens of each image."""


def _usable(files: DataFiles, encoder: PromptEncoder, tally: _Tally, folder: Path) -> Iterator[_Usable]:
    """Every row that meets the format, and whose images do; those that came as bytes are written into `folder`."""
    for path in files.paths:
        place = str(path)
        try:
            for number, raw in _raw_rows(path):
                place = f"{path}, row {number}"
                tally.bad.rows_of_files[path] += 1
                try:
                    if isinstance(raw, SchemaError):
                        raise raw
                    row = parse_row(raw, files.prompt_key)
                    images, counts = _images(row, encoder, path, place)
                    fields = _stored(row)
                except SchemaError as error:
                    tally.bad.add(path, place, error, raw)
                else:
                    fields["images"] = [_kept(image, folder) for image in images]
                    yield _Usable(path, place, fields, row.prompt, counts)
        except SchemaError as error:  # of the file: what comes after is lost
            broke = f"{path}, after row {place.rpartition(' ')[2]}" if place != str(path) else place
            tally.bad.add(path, broke, error)


def _images(row: VerlRow, encoder: PromptEncoder, path: Path, place: str) -> tuple[list[CheckedImage], tuple[int, ...]]:
    """The images of a row, and as how many tokens the model sees each.

    Raises:
        SchemaError: one of them can't be used.
        ConfigError: the model sees none: what is wrong is the choice of model or files, not the row.
    """
    sources = parse_images(row.images)
    if not sources and (sources is None or isinstance(encoder.vision, str)):
        return [], ()
    if isinstance(encoder.vision, str):
        raise ConfigError(
            f"{place} has images, and {encoder.vision}. Set model.path to a model that sees images ({', '.join(FAMILIES)}), or leave the "
            "column images out of the data."
        )
    images = check_images(sources, path.parent, "".join(message.content for message in row.prompt))
    return images, tuple(encoder.vision.tokens(image.width, image.height) for image in images)


def _kept(image: CheckedImage, folder: Path) -> str:
    """Its name in the row: a path, below `folder` for one that came as bytes."""
    if image.data is not None and not (folder / image.name).exists():
        folder.mkdir(exist_ok=True)
        (folder / image.name).write_bytes(image.data)
    return image.name


def _fitted(
    one: _Usable, ids: list[int], encoder: PromptEncoder, files: DataFiles, tally: _Tally
) -> dict[str, Any] | None:
    """What is stored of a row, unless it is bad or too long, which is counted."""
    try:
        if isinstance(encoder.vision, Vision):
            ids = encoder.vision.expand(ids, one.image_tokens)
        if not ids:
            raise SchemaError("the prompt has no tokens")
        if len(ids) > files.max_prompt_length:
            if files.filter_overlong_prompts:
                tally.overlong += 1
                return None
            raise SchemaError(f"the prompt has {len(ids)} tokens, more than {files.max_prompt_length}")
    except SchemaError as error:
        tally.bad.add(one.path, one.place, error)
        return None
    tally.longest = max(tally.longest, len(ids))
    tally.largest_token = max(tally.largest_token, max(ids))
    tally.rows_of_files[one.path] += 1
    tally.images += len(one.image_tokens)
    return {"prompt_ids": ids, **one.fields}


def _stored(row: VerlRow) -> dict[str, Any]:
    try:
        truth, extra = row.ground_truth, msgspec.msgpack.encode(row.extra_info or {})
    except (TypeError, OverflowError, RecursionError) as error:
        raise SchemaError(f"ground_truth or extra_info holds what can't be stored: {error}") from error
    return {"data_source": row.data_source, "ground_truth": truth, "extra_info": extra}


def _raw_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(number from 1, row or SchemaError) of one file; in JSONL the number is that of the line."""
    if path.is_dir():
        yield from enumerate(saved_rows(path), 1)
    elif path.suffix == ".parquet":
        yield from enumerate(parquet_rows(path), 1)
    else:
        yield from _json_lines(path)


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, _decode(line)
    except OSError as error:
        raise SchemaError(f"it can't be read: {error.strerror}") from error


def _decode(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except UNREADABLE as error:
        return SchemaError(f"not JSON in UTF-8: {error}")


def _fingerprint(files: DataFiles, encoder: PromptEncoder) -> str:
    """Of all that the prepared rows depend on; files count by path, size and time of change."""
    seen: list[object] = [FORMAT, encoder.fingerprint, files.prompt_key, files.max_prompt_length]
    seen += [files.filter_overlong_prompts, files.on_bad_row]
    for path in files.paths:
        seen += [str(path.resolve()), *_state(path)]
    return hashlib.sha256(msgspec.json.encode(seen)).hexdigest()


def _state(path: Path) -> list[int]:
    if not path.is_dir() and path.suffix not in (".jsonl", ".parquet"):
        reader = _READERS.get(path.suffix)
        command = (
            f"from datasets import Dataset; Dataset.{reader}('{path}').to_parquet('{path.with_suffix('.parquet')}')"
        )
        raise ConfigError(
            f"{path} is no data file: data.train_files and data.val_files take *.jsonl, *.parquet and folders of save_to_disk."
            + (f' Convert it: python -c "{command}"' if reader and path.is_file() else "")
        )
    try:
        found = [one.stat() for one in (sorted(path.iterdir()) if path.is_dir() else [path])]
    except OSError as error:
        raise ConfigError(
            f"The data file {path} can't be read: {error.strerror}. Set data.train_files and data.val_files to files that exist."
        ) from error
    return [number for one in found for number in (one.st_size, one.st_mtime_ns)]
