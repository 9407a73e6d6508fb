"""`scripts/mistakes`: runs every mistake with semel and with bare vLLM, and writes the page that shows both."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

from semel.engine.vllm.compat.versions import installed_version
from semel.lab.testing.models import build
from tools.start_mistakes import MISTAKES, Mistake, Said, Side, run

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "project" / "mistakes.md"
LOG: Final = ROOT / "build" / "mistakes.jsonl"
WITHIN_S: Final = 180
SHOWN_CHARS: Final = 200
PREFIX: Final = re.compile(r"^(\(\S+ pid=\d+\) )?((ERROR|INFO) [\d-]+ [\d:]+ \[[^\]]*\] ?)?\s*")
LIMIT_S: Final = 5.0

Results = dict[tuple[str, Side], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Typical mistakes, with semel and with bare vLLM.")
    parser.add_argument("names", nargs="*", help="mistakes whose names contain one of these")
    parser.add_argument("--log", type=Path, default=LOG, help="results; what is in it already is not run again")
    parser.add_argument("--again", action="store_true", help="run also what is in the log")
    parser.add_argument("--side", choices=get_args(Side), help="only one of the two")
    parser.add_argument("--write", action="store_true", help="write docs/project/mistakes.md")
    options = parser.parse_args()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    results = {} if options.again else read(options.log)
    chosen = [one for one in MISTAKES if not options.names or any(name in one.name for name in options.names)]
    sides: tuple[Side, ...] = (options.side,) if options.side else get_args(Side)
    with tempfile.TemporaryDirectory(prefix="mistakes-") as home:
        tiny = Path(home) / "tiny"
        build("qwen2-vl", tiny)
        for mistake in chosen:
            for side in sides:
                if (mistake.name, side) in results:
                    continue
                said = run(side, mistake, tiny, Path(home), WITHIN_S)
                entry = entry_of(mistake, side, said, home)
                results[mistake.name, side] = entry
                with options.log.open("a") as log:
                    log.write(json.dumps(entry) + "\n")
                place = f"cause in line {entry['cause_line']} of {entry['lines']}"
                sys.stdout.write(f"{side:6} {entry['seconds']:6.1f} s, {place}: {mistake.name}\n")
                sys.stdout.flush()
    if options.write:
        PAGE.write_text(page(results))


def read(log: Path) -> Results:
    if not log.is_file():
        return {}
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return {(entry["name"], entry["side"]): entry for entry in entries}


def entry_of(mistake: Mistake, side: Side, said: Said, home: str) -> dict[str, Any]:
    line = said.cause_line(mistake)
    shown = {"first_line": said.first_line, "cause": said.lines[line - 1] if line else ""}
    return {
        "name": mistake.name,
        "side": side,
        "seconds": round(said.seconds, 1),
        "code": said.code,
        "lines": len(said.lines),
        "cause_line": line,
        **{key: text.replace(f"{home}/model", "MODEL").replace(home, "") for key, text in shown.items()},
        "output": said.lines,
    }


def page(results: Results) -> str:
    rows = [_row(one, results[one.name, "semel"], results.get((one.name, "vllm"))) for one in MISTAKES]
    ours = [results[one.name, "semel"] for one in MISTAKES]
    first = sum(entry["cause_line"] == 1 for (_, side), entry in results.items() if side == "vllm")
    return f"""# Mistakes

What {len(MISTAKES)} typical mistakes at a start lead to: the first line that `semel serve` prints, the line with the
cause that bare vLLM {installed_version()} prints (the server of `vllm serve`, with the same arguments) and where it is,
and after how many seconds each of them ended. `scripts/mistakes --write` makes this page, and really runs both sides,
one after the other: a tiny Qwen2-VL on 2 cores, without a GPU. vLLM's
first line has the cause in {first} of them. The machine was busy, and both sides ran before everything else on it.

semel's checks read files and flags before anything is loaded; `--skip-checks` skips them, and `semel doctor MODEL`
runs them alone. The longest here took {max(entry["seconds"] for entry in ours):.1f} s.

| mistake | semel's first line | after | vLLM's line with the cause | it is | after |
|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


def _row(mistake: Mistake, ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> str:
    cells = [mistake.name, _shown(ours), f"{ours['seconds']:.1f} s"]
    if theirs is None:
        return f"| {' | '.join([*cells, 'not run', 'not run', 'not run'])} |"
    place = f"line {theirs['cause_line']} of {theirs['lines']}" if theirs["cause_line"] else "no line"
    ended = f"{theirs['seconds']:.1f} s" if theirs["code"] is not None else "it starts"
    return f"| {' | '.join([*cells, _shown(theirs, 'cause'), place, ended])} |"


def _shown(entry: Mapping[str, Any], key: str = "first_line") -> str:
    text = PREFIX.sub("", re.sub(r"\x1b\[[0-9;]*m", "", entry[key]))
    text = text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"
    escaped = text.replace("|", "\\|").replace("`", "'")
    return f"`{escaped}`" if text else "nothing"


if __name__ == "__main__":
    main()
