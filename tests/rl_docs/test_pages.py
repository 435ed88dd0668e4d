"""Links between files of the repository, as links of the site."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_docs.cli import run_mkdocs

CONFIG = """
site_name: small
docs_dir: assets
hooks: [{pages}]
validation: {{unrecognized_links: warn, anchors: warn}}
nav: [README.md, packages/one/README.md]
"""
PAGES = Path(__file__).resolve().parents[2] / "apps" / "docs" / "src" / "rl_docs" / "pages.py"


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function from the texts of two pages to the exit code of a strict build of them."""
    monkeypatch.setattr("rl_docs.repository.ROOT", tmp_path)
    monkeypatch.setattr("rl_docs.reference.reference_pages", dict)
    (tmp_path / "assets").mkdir()
    (tmp_path / "mkdocs.yml").write_text(CONFIG.format(pages=PAGES))

    def run(start: str, package: str) -> int:
        (tmp_path / "packages" / "one").mkdir(parents=True)
        (tmp_path / "README.md").write_text(start)
        (tmp_path / "packages" / "one" / "README.md").write_text(package)
        return run_mkdocs("build", "--strict", "-f", str(tmp_path / "mkdocs.yml"), "-d", str(tmp_path / "site"))

    return run


def test_a_link_to_a_folder_leads_to_its_readme(build, tmp_path: Path):
    assert build("[one](packages/one#use) and [sources](assets)", "# One\n\n## Use\n\n[up](../../README.md)") == 0
    start = (tmp_path / "site" / "index.html").read_text()
    assert '<a href="packages/one/#use">one</a> and sources' in start
    assert '<a href="../../">up</a>' in (tmp_path / "site" / "packages" / "one" / "index.html").read_text()


def test_a_linked_file_is_on_the_site(build, tmp_path: Path):
    (tmp_path / "run.py").write_text("print()\n")
    assert build("[program](run.py)", "[program](../../run.py)\n\n```\n[none](of.py)\n```") == 0
    assert (tmp_path / "site" / "run.py").read_text() == "print()\n"


@pytest.mark.parametrize("link", ["[gone](gone.md)", "[gone](packages/one/gone.py)", "[gone](packages/one#gone)"])
def test_a_broken_link_is_an_error(build, link: str, capfd: pytest.CaptureFixture[str]):
    assert build(link, "# One") == 1
    assert "gone" in capfd.readouterr().err


def test_a_link_out_of_the_repository_is_an_error(build, tmp_path: Path):
    (tmp_path.parent / "secret.txt").write_text("secret")
    assert build("[secret](../secret.txt)", "# One") == 1
    assert not (tmp_path / "site").exists() or "secret" not in {p.stem for p in (tmp_path / "site").rglob("*")}
