"""Command lines as vLLM's users write them: lists, underscores, a file of flags, flags of vLLM's server."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.cli.command_line import CommandLine
from semel.core.flag import flags_of
from semel.errors import ConfigError
from semel.lab.bench.settings import VerifySettings
from semel.settings.frontend import FrontendSettings
from semel.settings.serve import ServeSettings
from semel.settings.worker import WorkerSettings
from tests.commands import invoke, run_main

SECRET = "a-key-that-nobody-must-see"


def expand(line: str | list[str], kind: type = ServeSettings) -> CommandLine:
    found = CommandLine(flags_of(kind), takes_engine_flags=kind is not FrontendSettings)
    found.read(line.split() if isinstance(line, str) else line)
    return found


def verdicts(line: CommandLine) -> list[str]:
    return [one.verdict for one in line.findings]


def test_a_list_takes_several_values_as_vllms_do_and_may_be_repeated() -> None:
    expected = ["--api-key=a", "--api-key=b", "--allowed-media-domains=x", "--allowed-media-domains=y", "m"]
    assert expand("m --api-key a b --allowed-media-domains x y").words == expected
    assert expand("m --api-key a --api_key b --allowed_media_domains x y").words == expected
    assert expand("m --worker w1 w2", FrontendSettings).words == ["--worker=w1", "--worker=w2", "m"]


def test_lists_of_other_commands_take_several_values_and_leave_vllms_server_flags_alone() -> None:
    line = CommandLine(flags_of(VerifySettings), takes_engine_flags=True, knows_server_flags=False)
    line.read(["m", "--only", "again", "new", "--uvicorn-log-level", "info", "--config", "f.yaml"])
    passed_on = ["--uvicorn-log-level", "info", "--config", "f.yaml"]
    assert (line.words, line.findings) == (["--only=again", "--only=new", "m", *passed_on], [])


def test_a_flag_that_takes_one_value_takes_no_more() -> None:
    assert expand("--port 80 m --served-model-name a b").words == ["--port=80", "m", "--served-model-name", "a", "b"]


def test_vllms_engine_flags_stay_as_they_are() -> None:
    line = "m -tp 2 --limit-mm-per-prompt.image 2 --no-enforce-eager --tool-call-parser hermes -O3"
    assert expand(line).words == line.split()


@pytest.mark.parametrize(
    "line",
    [
        f"m --api-key {SECRET} {SECRET}2",
        f"m --api-key={SECRET} {SECRET}2 --nonsense",
        f"m --api_key {SECRET} --port x",
        f"m --api-key {SECRET} --middleware a",
    ],
)
@pytest.mark.parametrize("command", ["serve", "frontend"])
def test_what_follows_api_key_is_in_no_error(command: str, line: str) -> None:
    """The wrong implementation said: 'B' is no flag, and follows none that takes a value."""
    code, said = run_main(command, *line.split())
    assert (code, SECRET in said, bool(said)) == (2, False, True)


def test_a_flag_without_its_value_does_not_take_the_next_flag_for_it() -> None:
    with pytest.raises(ConfigError, match="--api-key needs a value"):
        expand("m --api-key --port 80")
    with pytest.raises(ConfigError, match="--config needs a value"):
        expand("m --config")


def test_server_flags_are_ignored_mapped_or_refused_each_with_a_line() -> None:
    line = expand("m --uvicorn-log-level info --h11-max-header-count 50 --middleware a.b --disable-fastapi-docs")
    assert line.words == ["--max-head-fields=50", "m"]
    assert verdicts(line) == ["warning", "warning", "problem", "warning"]
    assert "put a proxy before it" in str(line.findings[2])


def test_vllms_defaults_are_taken_without_a_word() -> None:
    line = expand("m --response-role assistant --sse-keep-alive-interval 0 --no-enable-log-deltas")
    assert (line.words, line.findings) == (["m"], [])
    assert verdicts(expand("m --response-role bot")) == ["problem"]


def test_data_parallel_size_is_a_number_of_workers_unless_ranks_are_meant() -> None:
    assert expand("m -dp 2").words == ["--workers=2", "m"]
    for others in ("--data-parallel-size 2 --data-parallel-rank 0", "-dp 2 --enable-expert-parallel"):
        assert expand(f"m {others}").words == ["m", *others.split()]
    assert expand("m --listen x -dp 2", WorkerSettings).words == ["--listen=x", "m", "-dp", "2"]


@pytest.mark.parametrize(
    ("kind", "flag", "place"),
    [
        (WorkerSettings, "--root-path x", "semel frontend"),
        (WorkerSettings, "--h11-max-header-count 9", "semel frontend"),
        (FrontendSettings, "--tool-call-parser hermes", "semel worker"),
        (FrontendSettings, "--data-parallel-size 2", "semel worker"),
    ],
)
def test_a_flag_of_the_other_role_says_where_it_belongs(kind: type, flag: str, place: str) -> None:
    (finding,) = expand(f"m {flag}", kind).findings
    assert finding.verdict == "problem"
    assert place in str(finding)


def test_adapters_that_depend_on_images_are_refused_at_once() -> None:
    code, said = run_main("serve", "m", "--enable-lora", '--default-mm-loras={"image": "a"}', "--skip-checks")
    assert (code, "cannot be used" in said) == (2, True)


def test_adapters_go_to_the_worker_as_they_are_written() -> None:
    flags = ["--enable-lora", "--lora-modules", "a=/a", '{"name": "b", "path": "/b"}']
    assert expand(["m", *flags]).words == ["m", *flags]


@pytest.mark.parametrize("role", [("serve",), ("frontend", "--worker", "ipc:///nowhere/w")])
def test_who_may_use_an_adapter_is_checked_before_a_start(role: tuple[str, ...]) -> None:
    code, said = run_main(role[0], "/nowhere", *role[1:], "--adapter-tenants", "sql")
    assert (code, "write ADAPTER=TENANT" in said, "/nowhere" in said) == (2, True, True), "with all other problems"


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_of_flags_counts_less_than_the_line(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        "model: from-the-file\nport: 8105\nhost: 0.0.0.0\napi_key: [a, b]\nverbose: true\nskip-checks: false\n"
        "served-model-name: [x, y]\nmax_model_len: 4096\nenforce-eager: true\nenable-prefix-caching: false\n"
        "limit-mm-per-prompt: {image: 2}\nuvicorn-log-level: info\nseed: null\n",
    )
    line = expand(["--config", path])
    own = ["--port=8105", "--host=0.0.0.0", "--api-key=a", "--api-key=b", "--verbose"]
    others = ["--served-model-name", "x", "y", "--max-model-len=4096", "--enforce-eager", "--no-enable-prefix-caching"]
    limit = ["--limit-mm-per-prompt", '{"image": 2}']
    assert line.words == [*own, "from-the-file", *others, *limit]
    assert verdicts(line) == ["warning"]
    both = expand(f"m --port 80 --api-key c --no-verbose --config={path} --max_model_len 8 -tp 2")
    theirs = [one for one in others if not one.startswith("--max-model-len")]
    expected = ["--host=0.0.0.0", "--port=80", "--api-key=c", "m", *theirs, *limit, "--max_model_len", "8", "-tp", "2"]
    assert both.words == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- a\n- b\n", "must have one `FLAG: VALUE` in each line"),
        (f"api-key: {SECRET}\n  x: [\n", "is no YAML, line 2"),
        ("port: 2024-01-01\n", "port must be text, a number"),
    ],
)
def test_a_file_that_is_no_file_of_flags_says_why_and_shows_nothing_of_it(
    tmp_path: Path, text: str, complaint: str
) -> None:
    done = invoke("serve", "m", "--config", config(tmp_path, text))
    assert done.exit_code == 2
    assert complaint in done.output
    assert SECRET not in done.output


def test_a_file_that_is_not_there_is_named() -> None:
    done = invoke("frontend", "m", "--config", "nowhere.yaml")
    assert (done.exit_code, "nowhere.yaml: No such file" in done.output) == (2, True)


def test_what_a_file_of_flags_says_wrong_is_said_by_the_flags_name(tmp_path: Path) -> None:
    code, said = run_main("worker", "m", "--config", config(tmp_path, "listen: ipc:///x\nprot: 3\ngrpc: true\n"))
    assert (code, "--prot" in said, "--grpc cannot be used" in said) == (2, True, True)


def test_vllms_way_to_name_the_model_is_taken() -> None:
    assert expand("--port 1 --model m -tp 2").words == ["--port=1", "m", "-tp", "2"]
    assert expand("--model=m --port 1").words == ["--port=1", "m"]
