"""Hooks of mkdocs: the pages of the site are the Markdown files of the repository, where they lie.

The navigation in mkdocs.yml names them by their path from the root. So a relative link is the same
on the site and in the repository, and there is one copy of each text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from rl_docs import reference, repository

FENCED = re.compile(r"^( *)```.*?^\1```$", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that the navigation names, and the files that they link to."""
    made = reference.reference_pages()
    pages = list(_paths(config["nav"]))
    for path in pages:
        if path in made:
            files.append(File.generated(config, path, content=made[path]))
        else:
            files.append(File.generated(config, path, abs_src_path=str(repository.ROOT / path)))
    for path in pages:
        if path not in made:
            for linked in _linked_files((repository.ROOT / path).read_text(encoding="utf-8"), path):
                if files.get_file_from_path(linked) is None:
                    files.append(File.generated(config, linked, abs_src_path=str(repository.ROOT / linked)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to folders into links to their README; without a page of that name, into text."""
    del config

    def replaced(found: re.Match[str]) -> str:
        path, hash_, anchor = found["target"].partition("#")
        inside = _from_root(path, page.file.src_uri)
        if inside is None or not (repository.ROOT / inside).is_dir():
            return found[0]
        readme = posixpath.join(inside, "README.md")
        if files.get_file_from_path(readme) is None:
            return found["text"].removeprefix("[").removesuffix("]")
        return f"{found['text']}({posixpath.join(path, 'README.md')}{hash_}{anchor})"

    return _outside_of_code(markdown, lambda text: LINK.sub(replaced, text))


def _paths(nav: Any) -> Iterator[str]:
    """Yield the pages that a navigation names: a path, or a list or mapping with paths in it."""
    if isinstance(nav, str):
        yield nav
        return
    for each in nav.values() if isinstance(nav, dict) else nav:
        yield from _paths(each)


def _linked_files(text: str, page: str) -> Iterator[str]:
    for found in LINK.finditer(FENCED.sub("", text)):
        inside = _from_root(found["target"].partition("#")[0], page)
        if inside is not None and (repository.ROOT / inside).is_file() and not inside.endswith(".md"):
            yield inside


def _from_root(target: str, page: str) -> str | None:
    """Return the path from the root that a link means, or None if it leaves the repository."""
    if not target or ":" in target or target.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return None if path.startswith("..") else path


def _outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    parts: list[str] = []
    end = 0
    for block in FENCED.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])
