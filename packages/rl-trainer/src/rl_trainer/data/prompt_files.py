"""Data sets from files in verl's row format, prepared once and memory-mapped by every process.

Prepared prompts are cached in one folder per combination of files, tokenizer and settings. It holds
`rows.arrow`, `report.json`, and `images/` for images that rows hold as bytes, named by content. The
folder appears atomically.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path

import msgspec

from rl_protocol import ConfigError
from rl_protocol.support.disk_writes import write_errors
from rl_protocol.support.temporary_folders import sweep, temporary_folder
from rl_trainer.data.arrow_tables import PromptTable
from rl_trainer.data.chat_template import PromptEncoder
from rl_trainer.data.prompt_preparation import IMAGES, DataFiles, Report, prepare
from rl_trainer.data.prompt_rows import PromptRow

logger = logging.getLogger(__name__)
_UNFINISHED = ".unfinished-"
FORMAT = 10
"""Version of the preparation; increase it when equal files and settings give another result."""
_READERS = {".csv": "from_csv", ".json": "from_json"}
"""Other kinds of files, and the method of `datasets.Dataset` that reads them."""


class FilePrompts:
    """A PromptDataset over a folder of prepared prompts; holds a memory map, not the rows."""

    def __init__(self, folder: Path) -> None:
        self.report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
        self._rows = PromptTable(folder / "rows.arrow")
        self._images = folder.absolute() / IMAGES

    @property
    def rows_of_files(self) -> tuple[int, ...]:
        """Usable rows of each file, in order."""
        return self.report.rows_of_files

    @property
    def digests_of_files(self) -> tuple[str, ...]:
        """SHA-256 of each file, in order, when it was prepared."""
        return self.report.digests_of_files

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return self.report.longest

    @property
    def largest_token(self) -> int:
        """Largest token id of all prompts."""
        return self.report.largest_token

    @property
    def most_image_tokens(self) -> int:
        """Most tokens of a prompt that stand for images."""
        return self.report.most_image_tokens

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
            agent=fields["agent"],
        )


def open_files(files: DataFiles, encoder: PromptEncoder, cache_dir: Path) -> FilePrompts:
    """The prompts of these files, from the cache or prepared now.

    Raises:
        ConfigError: a file is missing or of an unknown kind; there are bad rows, unless
            `files.on_bad_row` is "skip"; no valid row is left.
        OutputError: the cache can't be written.
    """
    folder = cache_dir / f"data-{_fingerprint(files, encoder)[:24]}"
    sweep(_UNFINISHED, cache_dir)
    if not (folder / "report.json").exists():
        with write_errors(
            folder, "The prompts", "Free some space there, or set open_files.cache_dir to another place."
        ):
            _publish(folder, files, encoder)
    prompts = FilePrompts(folder)
    for line in prompts.report.left_out(files):
        logger.warning(line)
    return prompts


def _publish(folder: Path, files: DataFiles, encoder: PromptEncoder) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(_UNFINISHED, folder.parent) as temporary:
        fresh = temporary / "new"
        fresh.mkdir()
        report = prepare(files, encoder, fresh / "rows.arrow")
        (fresh / "report.json").write_bytes(msgspec.json.encode(report))
        try:
            fresh.rename(folder)
        except OSError:
            if not (folder / "report.json").exists():  # otherwise another process was first
                raise
            shutil.rmtree(fresh)


def _fingerprint(files: DataFiles, encoder: PromptEncoder) -> str:
    """Hash of everything that prepared prompts depend on; of files, the path, size and time."""
    seen: list[object] = [FORMAT, encoder.fingerprint, files.prompt_key, files.ground_truth_key]
    seen += [files.max_prompt_length, files.filter_overlong_prompts, files.on_bad_row, files.session]
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
            f"{path} is not a data file: DataFiles.paths can be *.jsonl, *.parquet and folders of save_to_disk."
            + (f' Convert it: python -c "{command}"' if reader and path.is_file() else "")
        )
    try:
        found = [one.stat() for one in (sorted(path.iterdir()) if path.is_dir() else [path])]
    except OSError as error:
        looked = "" if path.is_absolute() else f" (relative to {Path.cwd()})"
        listed = "; patterns are not expanded, so name each file" if set("*?[") & set(str(path)) else ""
        raise ConfigError(
            f"The data file {path}{looked} can't be read: {error.strerror}. Set DataFiles.paths to files that exist{listed}."
        ) from error
    return [number for one in found for number in (one.st_size, one.st_mtime_ns)]
