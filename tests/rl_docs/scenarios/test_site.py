"""The whole site: built strictly from the command line, whole, and without other hosts."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import find_chromium, page

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=\"?(https?:)?//")
"""An element that a browser loads from another host."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "apps" / "docs"), "build", "--out", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def pages(site: Path) -> dict[str, str]:
    return {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


def test_a_page_loads_nothing_from_another_host(site: Path):
    texts = pages(site)
    assert len(texts) > 40
    assert LOADED.search('<script src="https://x/y.js">')
    assert {name for name, text in texts.items() if LOADED.search(text)} == set()
    assert "//" not in re.sub(r"/\*.*?\*/", "", (site / "site.css").read_text(), flags=re.DOTALL)


def test_the_reference_is_that_of_the_code(site: Path):
    assert "rl_app_ppo.train" in (site / "reference" / "rl_app_ppo.html").read_text()
    assert "one JSON object" not in (site / "reference" / "rl.html").read_text()
    assert 'id="rl-report"' in (site / "reference" / "rl.html").read_text()
    options = (site / "apps" / "ppo" / "OPTIONS.html").read_text()
    assert "<code>async_rl.max_staleness</code>" in options


def test_examples_are_shown_with_their_code(site: Path):
    guide = (site / "docs" / "guides" / "estimator_and_loss.html").read_text()
    assert "median_baseline" in guide
    assert "squared_trust_region" in guide
    assert "--8&lt;--" not in re.sub(r"<code>.*?</code>", "", guide)


def test_pictures_are_there(site: Path):
    for name, text in pages(site).items():
        for target in re.findall(r"<img [^>]*src=\"([^\"]+)\"", text):
            assert ((site / name).parent / target).resolve().is_file(), f"{name}: {target}"


@pytest.mark.skipif(
    find_chromium() is None, reason="THE SEARCH IS NOT TESTED: chromium is not installed (apt-get install chromium)"
)
def test_the_search_works_from_disk_without_a_network(site: Path):
    async def found() -> tuple[list[str], set[str], list[str]]:
        async with page(find_chromium() or "") as tab:
            await tab.send("Page.navigate", url=f"{(site / 'index.html').as_uri()}?q=staleness")
            await tab.wait_for("document.querySelector('.md-search-result__link')")
            links = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.getAttribute('href'))"
            return await tab.evaluate(links), {url.partition(":")[0] for url in tab.requests}, tab.problems

    links, schemes, problems = asyncio.run(found())
    assert any("docs/concepts/async.html" in link for link in links)
    assert schemes <= {"file", "data"}
    assert problems == []
