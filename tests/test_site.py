"""The documentation site builds, warnings are errors, and its reference is made from the code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from semel.telemetry.metrics import METRICS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
MKDOCS = Path(sys.executable).parent / "mkdocs"


def build(site: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [str(MKDOCS), "build", "--strict", "--site-dir", str(site), "--config-file", str(config)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere(site: Path) -> None:
    built = {page.stem for page in site.rglob("*.html")}
    written = {page.stem for page in (ROOT / "docs").rglob("*.md")}
    assert written <= built


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("[nowhere](nowhere.md)\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text("site_name: wrong\n")
    assert build(tmp_path / "site", config).returncode != 0


def test_nothing_on_the_site_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"?(https?://[^\s\">]+)", page.read_text())
        assert not fetched, page


def test_the_reference_is_that_of_the_code(site: Path) -> None:
    metrics = (site / "reference/metrics.html").read_text()
    assert all(metric.name in metrics for metric in METRICS)
    commands = (site / "reference/commands.html").read_text()
    assert all(flag in commands for flag in ("--feature-cache-gb", "--encoder-planning", "--api-keys-file"))
    assert "Submit" in (site / "reference/messages.html").read_text()
    assert "context_length_exceeded" in (site / "reference/errors.html").read_text()


def test_the_reference_of_commands_begins_with_serve_and_leaves_no_cell_empty(site: Path) -> None:
    page = (site / "reference/commands.html").read_text()
    names = re.findall(r"<h2[^>]*>(semel [a-z ]+?)\s*<", page)
    assert names[:3] == ["semel serve", "semel frontend", "semel worker"]
    assert names[-1].startswith("semel bench")
    assert not re.search(r"<t[dh]>\s*</t[dh]>", page)
    (port,) = set(re.findall(r"<tr>\s*<td><code[^>]*>--port</code></td>.*?</tr>", page, re.DOTALL))
    assert re.findall(r"<td>(.*?)</td>", port)[1:] == ["integer, from 0 to 65535", "8000", "Port to listen on."]


def pages_with(site: Path, words: str) -> set[str]:
    """The pages whose text has the words: those that a search for them finds."""
    index = json.loads((site / "search/search_index.js").read_text().removeprefix("var __index = ").rstrip("; \n"))
    plain = re.compile(rf"\b{re.escape(words)}\b", re.IGNORECASE)
    return {
        entry["location"].partition("#")[0]
        for entry in index["docs"]
        if plain.search(entry["title"]) or plain.search(re.sub(r"<[^>]+>", " ", entry["text"]))
    }


@pytest.mark.parametrize(
    "words", ["TTFT", "rate limit", "HPA", "FP8", "disaggregation", "LoRA", "docker", "load shedding", "drain", "quota"]
)
def test_a_search_for_the_field_s_words_finds_a_page(site: Path, words: str) -> None:
    assert pages_with(site, words)
    assert not pages_with(site, f"{words}less"), "the control: a word that no page has"


MEASURE = """<script>
const tables = [...document.querySelectorAll("table")];
const page = document.querySelector(".md-content").clientWidth;
document.title = "widest " + Math.max(0, ...tables.map((one) => one.scrollWidth - page));
</script>"""
"""By how many pixels the widest table is wider than its page."""


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser: apt-get install chromium")
def test_tables_fit_a_window_of_1280_pixels(site: Path, tmp_path: Path) -> None:
    def overflow(page: Path) -> int:
        browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--dump-dom"]
        done = subprocess.run([*browser, f"file://{page}"], capture_output=True, text=True, timeout=100, check=True)
        (found,) = re.findall(r"<title>widest (-?\d+)</title>", done.stdout)
        return int(found)

    copy = tmp_path / "site"
    shutil.copytree(site, copy)
    pages = [page for page in copy.rglob("*.html") if "<table>" in page.read_text()]
    for page in pages:
        page.write_text(page.read_text().replace("</body>", f"{MEASURE}</body>"))
    assert len(pages) > 30
    assert {str(page.relative_to(copy)): wide for page in pages if (wide := overflow(page)) > 0} == {}
    (copy / "assets/site.css").write_text("table { min-width: 2000px; }")
    assert overflow(copy / "get-started/models.html") > 0, "the control: a table that is too wide is found"


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("width", [1400, 400])
def test_search_finds_pages_from_the_built_folder_in_a_browser(site: Path, width: int) -> None:
    def found(page: str) -> str:
        browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
        command = [*browser, "--virtual-time-budget=15000", "--dump-dom", f"file://{site}/{page}?q=rollouts"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        return "".join(re.findall(r'<li class="md-search-result__item">.*?</li>', done.stdout, re.DOTALL))

    assert "rollouts.html" in found("index.html")
    (site / "assets/iframe-worker.js").rename(site / "assets/gone.js")
    try:
        assert not found("index.html"), "without its script, nothing is found"
    finally:
        (site / "assets/gone.js").rename(site / "assets/iframe-worker.js")
