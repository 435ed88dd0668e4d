"""Prepares prompts from data files: checks every row, renders and tokenizes its prompt."""

from __future__ import annotations

import codecs
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from rl_protocol import ConfigError, SchemaError
from rl_protocol.counted import counted
from rl_protocol.errors import UNREADABLE
from rl_trainer.data.arrow_tables import BATCH_ROWS, parquet_rows, prompt_writer, saved_rows
from rl_trainer.data.bad_rows import ROW_FORMAT, BadRows
from rl_trainer.data.chat_template import Conversation, PromptEncoder
from rl_trainer.data.images import FAMILIES, CheckedImage, Vision, check_images, parse_images
from rl_trainer.data.prompt_rows import SINGLE_TURN_AGENT, Message, VerlRow, check_agent, parse_row

IMAGES = "images"
"""Folder of the images that rows hold as bytes, beside the prepared rows."""


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """The files to read, and how to treat bad and overlong rows."""

    paths: tuple[Path, ...]
    """*.jsonl, *.parquet, or folders written by `datasets.Dataset.save_to_disk`."""
    prompt_key: str = "prompt"
    ground_truth_key: str = "ground_truth"
    """Field with the ground truth of rows without `reward_model`."""
    max_prompt_length: int
    """In tokens."""
    filter_overlong_prompts: bool = True
    """Drop longer prompts; otherwise they are bad rows."""
    on_bad_row: Literal["error", "skip"] = "error"
    session: str = "single_turn"
    """Name of the session of the run, which must be able to run each row's `agent_name`."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and statistics of a preparation."""

    rows: int
    overlong: int
    """Prompts that were dropped because of their length."""
    bad: int
    """Rows that are not valid, and files that are truncated."""
    bad_rows: tuple[str, ...]
    """One line per fault: number of rows, file and number of the first, and the reason."""
    longest: int
    """Tokens of the longest prompt."""
    largest_token: int
    """Largest token id of all usable prompts."""
    rows_of_files: tuple[int, ...]
    """Usable rows of each file, in order."""
    digests_of_files: tuple[str, ...]
    """SHA-256 of each file, in order, as `file_digest`; empty: it can't be read."""
    images: int
    """Number of images of all usable rows."""
    most_image_tokens: int
    """Most tokens of a prompt that stand for images."""

    def __str__(self) -> str:
        return f"{counted(self.bad, 'bad row')}: {'; '.join(self.bad_rows)}"

    def left_out(self, files: DataFiles) -> list[str]:
        """A line for each reason why rows of these files are not used."""
        lines = [f"left out: {self}"] if self.bad else []
        if self.overlong:
            of = f"{self.overlong} of {counted(self.rows + self.overlong, 'prompt')} in {', '.join(map(str, files.paths))}"
            lines.append(f"left out: {of}, longer than DataFiles.max_prompt_length={files.max_prompt_length} tokens")
        return lines


def prepare(files: DataFiles, encoder: PromptEncoder, target: Path) -> Report:
    """Check all rows and write the usable ones to the Arrow file `target`.

    Images that rows hold as bytes are written into the folder IMAGES beside it.

    Raises:
        ConfigError: a file is missing or of an unknown kind; there are bad rows, unless
            `files.on_bad_row` is "skip"; no valid row is left.
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


def file_digest(path: Path) -> str:
    """SHA-256 of a file; of a folder: of the names and digests of its files.

    Raises:
        SchemaError: it can't be read.
    """
    if path.is_dir():
        parts = [(one.name, file_digest(one)) for one in sorted(path.iterdir()) if one.is_file()]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SchemaError(f"it can't be read: {error.strerror}") from error


def _why_none(report: Report, files: DataFiles, tally: _Tally) -> str:
    reasons: list[str] = []
    if report.overlong:
        most = files.max_prompt_length
        reasons.append(f"Prompts with more than {most} tokens (DataFiles.max_prompt_length): {report.overlong}.")
    if report.bad:
        reasons.append(f"{report}. {tally.bad.remedy(files.prompt_key, can_skip=bool(report.rows))}")
    return " ".join(reasons) or f"there are no rows at all. A row is {ROW_FORMAT}."


def _encoded(batch: Sequence[_Usable], encoder: PromptEncoder, tally: _Tally) -> Iterator[tuple[_Usable, list[int]]]:
    """Rows with their token ids, except those that the chat template rejects."""
    texts = encoder.texts(
        [
            Conversation(one.prompt, images=bool(one.image_tokens), tools=one.fields["agent"] != SINGLE_TURN_AGENT)
            for one in batch
        ]
    )
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
    most_image_tokens: int = 0
    rows_of_files: Counter[int] = field(default_factory=Counter[int])
    """By place in `DataFiles.paths`, which may name a file twice."""
    digests: dict[Path, str] = field(default_factory=dict[Path, str])
    bad: BadRows = field(default_factory=BadRows)

    def report(self, paths: Sequence[Path]) -> Report:
        return Report(
            rows=self.rows_of_files.total(),
            overlong=self.overlong,
            bad=self.bad.count,
            bad_rows=self.bad.lines(),
            longest=self.longest,
            largest_token=self.largest_token,
            rows_of_files=tuple(self.rows_of_files[file] for file in range(len(paths))),
            digests_of_files=tuple(self.digests.get(path, "") for path in paths),
            images=self.images,
            most_image_tokens=self.most_image_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Usable:
    """A valid row, before its prompt is encoded."""

    path: Path
    file: int
    """Place of the path in `DataFiles.paths`."""
    place: str
    fields: dict[str, Any]
    """The fields to store."""
    prompt: Sequence[Message]
    image_tokens: tuple[int, ...]
    """Tokens of each image."""


def _usable(files: DataFiles, encoder: PromptEncoder, tally: _Tally, folder: Path) -> Iterator[_Usable]:
    """Every valid row; images given as bytes are written into `folder`."""
    for file, path in enumerate(files.paths):
        place = str(path)
        try:
            tally.digests[path] = file_digest(path)
            for number, raw in _raw_rows(path):
                place = f"{path}, row {number}"
                tally.bad.rows_of_files[path] += 1
                try:
                    if isinstance(raw, SchemaError):
                        raise raw
                    row = parse_row(raw, files.prompt_key, files.ground_truth_key)
                    check_agent(row.agent_name or "", files.session)
                    images, counts = _images(row, encoder, path, place)
                    fields = _stored(row)
                except SchemaError as error:
                    tally.bad.add(path, place, error, raw)
                else:
                    fields["images"] = [_kept(image, folder) for image in images]
                    yield _Usable(path, file, place, fields, row.prompt, counts)
        except SchemaError as error:  # of the file: the rest of it is lost
            position = f"{path}, after row {place.rpartition(' ')[2]}" if place != str(path) else place
            tally.bad.add(path, position, error)


def _images(row: VerlRow, encoder: PromptEncoder, path: Path, place: str) -> tuple[list[CheckedImage], tuple[int, ...]]:
    """The images of a row, and the number of tokens of each.

    Raises:
        SchemaError: an image can't be used.
        ConfigError: the model can't read images, so all such rows are unusable.
    """
    sources = parse_images(row.images)
    if not sources and (sources is None or isinstance(encoder.vision, str)):
        return [], ()
    if isinstance(encoder.vision, str):
        raise ConfigError(
            f"{place} has images, and {encoder.vision}. Set PromptEncoder.vision to a model that reads images ({', '.join(FAMILIES)}), or remove "
            "the column images from the data."
        )
    images = check_images(sources, path.parent, "".join(message.content for message in row.prompt))
    return images, tuple(encoder.vision.tokens(image.width, image.height) for image in images)


def _kept(image: CheckedImage, folder: Path) -> str:
    """Its name in the stored row; an image given as bytes is written into `folder`."""
    if image.data is not None and not (folder / image.name).exists():
        folder.mkdir(exist_ok=True)
        (folder / image.name).write_bytes(image.data)
    return image.name


def _fitted(
    one: _Usable, ids: list[int], encoder: PromptEncoder, files: DataFiles, tally: _Tally
) -> dict[str, Any] | None:
    """The fields to store, or None for a bad or overlong row, which is counted."""
    try:
        if isinstance(encoder.vision, Vision):
            ids = encoder.vision.expand(ids, one.image_tokens)
        if not ids:
            raise SchemaError("the prompt has no tokens")
        if len(ids) > files.max_prompt_length:
            if files.filter_overlong_prompts:
                tally.overlong += 1
                return None
            raise SchemaError(
                f"the prompt has {len(ids)} tokens, more than DataFiles.max_prompt_length={files.max_prompt_length} "
                "(DataFiles.filter_overlong_prompts=true leaves it out)"
            )
    except SchemaError as error:
        tally.bad.add(one.path, one.place, error)
        return None
    tally.longest = max(tally.longest, len(ids))
    tally.largest_token = max(tally.largest_token, max(ids))
    tally.rows_of_files[one.file] += 1
    tally.images += len(one.image_tokens)
    tally.most_image_tokens = max(tally.most_image_tokens, sum(one.image_tokens))
    return {"prompt_ids": ids, **one.fields}


def _stored(row: VerlRow) -> dict[str, Any]:
    try:
        truth, extra = row.ground_truth, msgspec.msgpack.encode(row.extra_info or {})
    except (TypeError, OverflowError, RecursionError) as error:
        raise SchemaError(f"ground_truth or extra_info can't be stored: {error}") from error
    return {"data_source": row.data_source, "ground_truth": truth, "extra_info": extra, "agent": row.agent_name or ""}


def _raw_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(number from 1, row or SchemaError) of one file; in JSONL the number is the line."""
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
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text and not text.isspace():
                    yield number, _decode(text)
    except OSError as error:
        raise SchemaError(f"it can't be read: {error.strerror}") from error


def _decode(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except UNREADABLE as error:
        return SchemaError(f"not JSON in UTF-8: {error}")
