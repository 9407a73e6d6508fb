"""The Helm chart: linted and rendered by a real Helm, valid for three versions of Kubernetes, and held to the code."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.telemetry.prometheus import find
from tools.chart import CHART, ROOT, VERSIONS, faults_in, helm, render

MONITORING = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def values_of(tmp_path: Path, **values: Any) -> Path:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def groups(count: int) -> list[dict[str, Any]]:
    return [
        {
            "name": f"gpu-{number}",
            "replicas": number,
            "engineArgs": ["--max-model-len=8192", f"--tensor-parallel-size={1 + number % 2}"],
            "resources": {
                "requests": {"cpu": "4", "memory": "32Gi"},
                "limits": {"memory": "64Gi", "nvidia.com/gpu": 1 + number % 2},
            },
            "nodeSelector": {"gpu": f"kind-{number}"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "runtimeClassName": "nvidia",
        }
        for number in range(count)
    ]


COLLECTOR = "http://collector.monitoring.svc:4318/v1/traces"
STORE: dict[str, Any] = {
    "nodes": ["valkeys://semel@store-0.example:6380", "valkeys://semel@store-1.example:6381"],
    "secret": {"name": "semel-store", "passwordKey": "password", "caKey": "ca.crt"},
}
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "1 group": {"groups": groups(1)},
    "4 groups": {"groups": groups(4), "networkPolicy": {"monitoring": MONITORING}},
    "everything": {
        "groups": groups(2),
        "discovery": "dns",
        "secrets": {"apiKeys": {"name": "", "key": "k"}},
        "imagePullSecrets": [{"name": "registry"}],
        "frontend": {
            "image": {"variant": "slim"},
            "extraArgs": ["--max-requests=100"],
            "extraEnv": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
            "drainDelaySeconds": 7.5,
            "autoscaling": {"enabled": False},
            "service": {"trafficDistribution": "PreferSameZone", "annotations": {"a": "b"}},
            "podAnnotations": {"a": "b"},
            "affinity": {"nodeAffinity": {}},
        },
        "networkPolicy": {
            "clients": MONITORING,
            "monitoring": MONITORING,
            "frontendEgress": [{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}], "ports": [{"port": 9000}]}],
            "workerEgress": [{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}], "ports": [{"port": 443}]}],
        },
        "media": {"allowedDomains": ["images.example"], "store": "s3://files/semel", "peers": MONITORING},
        "embeddingStore": STORE | {"peers": MONITORING},
        "traces": {"endpoint": COLLECTOR, "peers": MONITORING},
        "monitoring": {"serviceMonitor": {"enabled": True, "labels": {"release": "p"}, "interval": "15s"}},
    },
    "scaled workers": {
        "groups": [one | {"maxReplicas": 20 * (one["name"] != "gpu-1")} for one in groups(3)],
        "worker": {"autoscaling": {"enabled": True, "missesPerSecond": 2.5}},
    },
    "scaled by requests": {"frontend": {"autoscaling": {"requestsInFlight": 256}}},
    **{path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES},
}


@pytest.mark.parametrize(
    "name", [name if name == "everything" else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
)
def test_the_chart_is_linted_and_every_object_is_valid_for_three_versions_of_kubernetes(
    name: str, tmp_path: Path
) -> None:
    values = values_of(tmp_path, **SETTINGS[name])
    linted = helm("lint", "--strict", CHART, "--values", values)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    for version in VERSIONS:
        objects = render(values, "--kube-version", version)
        assert faults_in(objects, version) == []
    count = len(SETTINGS[name].get("groups", [None]))
    assert len([one for one in objects if one["kind"] == "Deployment"]) == 1 + count


def test_each_group_has_workers_a_service_and_a_budget_and_frontends_know_all_of_them(tmp_path: Path) -> None:
    objects = render(values_of(tmp_path, groups=groups(4)))
    names = {f"demo-worker-gpu-{number}" for number in range(4)}
    for kind in ("Deployment", "Service", "PodDisruptionBudget"):
        assert names <= {one["metadata"]["name"] for one in objects if one["kind"] == kind}
    (frontend,) = [one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"] == "demo-frontend"]
    arguments = frontend["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {f"--worker-endpoint-slices=ml/{name}:wire" for name in names} <= {*arguments}


def test_each_role_gets_its_own_keys_and_sees_new_ones_without_a_restart() -> None:
    """Control: with the Secret of the other role, or a `subPath`, which a kubelet never updates, this fails."""
    for one in (found for found in render() if found["kind"] == "Deployment"):
        pod = one["spec"]["template"]["spec"]
        role = one["metadata"]["labels"]["app.kubernetes.io/component"]
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "keys"]
        assert volume["secret"]["secretName"] == f"semel-{role}-keys"
        (container,) = pod["containers"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "keys"]
        assert f"--key-dir={mount['mountPath']}" in container["args"]
        assert "subPath" not in mount
        assert "items" not in volume["secret"]


VALUES: dict[str, dict[str, Any]] = {
    "a store": {"embeddingStore": STORE},
    "spans": {"traces": {"endpoint": COLLECTOR}},
    "a bucket": {"media": {"store": "gs://files"}, "discovery": "dns"},
    "scaled": {"groups": groups(2), "worker": SETTINGS["scaled workers"]["worker"]},
    "scraped": {"monitoring": {"serviceMonitor": {"enabled": True}}},
    "nothing": {},
}
VALUES["scaled"]["groups"][0] |= {"maxReplicas": 4}

MUTATIONS: dict[str, tuple[str, str, str]] = {
    "a flag that there is not": ("templates/frontend.yaml", "--metrics-host=", "--metrics-hosts="),
    "a value that a flag does not take": ("templates/worker.yaml", "--log-format=json", "--log-format=xml"),
    "killed while it drains": ("templates/_helpers.tpl", ".drainSeconds 15", "0 15"),
    "root may write": ("templates/_helpers.tpl", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"),
    "capabilities": ("templates/_helpers.tpl", "{drop: [ALL]}", "{drop: [NET_RAW]}"),
    "a secret that nobody can read": ("templates/_helpers.tpl", "defaultMode: 0440", "defaultMode: 0400"),
    "frontends restart without workers": (
        "templates/_helpers.tpl",
        "httpGet: {path: /health, port: {{ .port }}}\n  periodSeconds: 10",
        "httpGet: {path: /ready, port: {{ .port }}}\n  periodSeconds: 10",
    ),
    "a probe at a port that is not there": ("templates/worker.yaml", '"port" "admin"', '"port" "metrics"'),
    "a field that is spelt wrong": ("templates/worker.yaml", "progressDeadlineSeconds", "progressDeadlineSecond"),
    "a number as text": ("templates/frontend.yaml", "maxUnavailable: 1\n", "maxUnavailable: {}\n"),
    "a service for other pods": ("templates/worker.yaml", "  clusterIP: None", "  clusterIP: 10.0.0.1"),
    "a port that no pod has": ("templates/frontend.yaml", "targetPort: http,", "targetPort: https,"),
    "everybody reaches workers": (
        "templates/network.yaml",
        """    - ports: [{port: wire, protocol: TCP}]
      from:
        - podSelector:
            matchLabels:
              {{- $frontend | nindent 14 }}
    {{- with .monitoring }}
    - ports: [{port: admin,""",
        """    - ports: [{port: wire, protocol: TCP}]
    {{- with .monitoring }}
    - ports: [{port: admin,""",
    ),
    "frontends may change slices": ("templates/accounts.yaml", "[list, watch]", "[list, watch, update]"),
    "workers have a token": (
        "templates/worker.yaml",
        "automountServiceAccountToken: false",
        "automountServiceAccountToken: true",
    ),
    "a scaler of nobody": (
        "templates/frontend.yaml",
        "kind: Deployment, name: {{ include",
        "kind: Deployment, name: x{{ include",
    ),
    "a scaler against its deployment": (
        "templates/frontend.yaml",
        "{{- if not .autoscaling.enabled }}",
        "{{- if true }}",
    ),
    "a volume that is not mounted": (
        "templates/worker.yaml",
        "            - {name: shared-memory, mountPath: /dev/shm}\n",
        "",
    ),
    "slices of another namespace": (
        "templates/frontend.yaml",
        "--worker-endpoint-slices={{ $.Release.Namespace }}/",
        "--worker-endpoint-slices=default/",
    ),
    "no delay": ("templates/frontend.yaml", "--drain-delay-s={{ .drainDelaySeconds }}", "--drain-delay-s=0"),
}
NETWORK, WORKER = "templates/network.yaml", "templates/worker.yaml"
DNS = '{{- include "semel.dnsEgress" $ | nindent 4 }}'
IF_NEEDED = "{{- if or $store.nodes $traces.endpoint .workerEgress }}"
MUTATIONS_WITH_VALUES: dict[str, tuple[str, str, str, str]] = {
    "workers with a store and `egress: []`": ("a store", NETWORK, IF_NEEDED, "{{- if false }}"),
    "workers reach one node of two": (
        "a store",
        "templates/_helpers.tpl",
        "range uniq $ports",
        "range list (first $ports)",
    ),
    "workers cannot look the store up": ("a store", NETWORK, f"  egress:\n    {DNS}", "  egress:"),
    "the store's password is not mounted": (
        "a store",
        WORKER,
        "            - {name: store, mountPath: /run/secrets/semel/store, readOnly: true}\n",
        "",
    ),
    "workers with a collector and `egress: []`": ("spans", NETWORK, IF_NEEDED, "{{- if false }}"),
    "workers reach everything": ("spans", NETWORK, f"  egress:\n    {DNS}", f"  egress:\n    - {{}}\n    {DNS}"),
    "workers reach others for nothing": ("nothing", NETWORK, "egress: []", "egress: [{ports: [{port: 443}]}]"),
    "frontends cannot reach the bucket": ("a bucket", NETWORK, "[{port: 443, protocol", "[{port: 80, protocol"),
    "metrics that nobody exports": ("scaled", WORKER, "encoder_cache_hits_total", "encoder_hits_total"),
    "the queue of all groups": ("scaled", WORKER, "Namespace $name }}", 'Namespace "demo-worker-gpu-[0-9]" }}'),
    "a scaler of workers against its deployment": ("scaled", WORKER, "{{- if not $isScaled }}", "{{- if true }}"),
    "a field that KEDA has not": ("scaled", WORKER, "minReplicaCount:", "minReplicas:"),
    "workers are not scraped": ("scraped", WORKER, "{name: admin, port: 9100,", "{name: adm, port: 9100,"),
    "metrics at a Service of many": ("scraped", "templates/monitoring.yaml", "  clusterIP: None\n", ""),
}


def faults_of_mutant(file: str, before: str, after: str, folder: Path, values: Path | None = None) -> list[str]:
    chart = shutil.copytree(CHART, folder / "semel")
    text = (chart / file).read_text()
    assert before in text
    (chart / file).write_text(text.replace(before, after))
    try:
        return faults_in(render(values, chart=chart))
    except ValueError as error:
        return [str(error)]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutant_what_is_wrong_with_a_chart_is_found(name: str, tmp_path: Path) -> None:
    assert faults_of_mutant(*MUTATIONS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS_WITH_VALUES)
def test_mutant_what_is_wrong_with_what_values_ask_for_is_found(name: str, tmp_path: Path) -> None:
    setting, file, before, after = MUTATIONS_WITH_VALUES[name]
    found = faults_of_mutant(file, before, after, tmp_path, values_of(tmp_path, **VALUES[setting]))
    assert found
    assert not any("YAML" in fault for fault in found), "the mutant is no chart"


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_the_chart_as_it_is_does_what_these_values_ask_for(name: str, tmp_path: Path) -> None:
    """Control of the mutants above."""
    assert faults_in(render(values_of(tmp_path, **VALUES[name]))) == []


@pytest.mark.slow
@pytest.mark.parametrize("is_wrong", [False, True])
def test_workers_are_scaled_by_the_queue_and_the_misses_of_their_own_group(tmp_path: Path, *, is_wrong: bool) -> None:
    """A real promtool evaluates the queries on series of two pods, and on others. Control: a wrong sum."""
    objects = render(values_of(tmp_path, **VALUES["scaled"]))
    (scaled,) = [one for one in objects if one["kind"] == "ScaledObject"]
    queue, misses = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]

    def series(name: str, pod: str, values: str, namespace: str = "ml") -> dict[str, str]:
        return {"series": f'{name}{{namespace="{namespace}", pod="{pod}", engine="0"}}', "values": values}

    first, second, other = (
        "demo-worker-gpu-0-5f4d-aaaaa",
        "demo-worker-gpu-0-5f4d-bbbbb",
        "demo-worker-gpu-1-5f4d-ccccc",
    )
    given = [
        series("vllm:num_requests_waiting", first, "3x10"),
        series("vllm:num_requests_waiting", second, "5x10"),
        series("semel_engine_waiting_requests", first, "2x10"),
        series("semel_engine_waiting_requests", other, "100x10"),
        series("vllm:num_requests_waiting", first, "100x10", namespace="others"),
        series("semel_encoder_cache_queries_total", first, "0+600x10"),
        series("semel_encoder_cache_hits_total", first, "0+360x10"),
        series("semel_encoder_cache_queries_total", other, "0+6000x10"),
        series("semel_encoder_cache_hits_total", other, "0+60x10"),
    ]
    expected = [(queue, 10), (misses, 40 if is_wrong else 4)]
    asked = [
        {"expr": query, "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": value}]}
        for query, value in expected
    ]
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps({"tests": [{"interval": "1m", "input_series": given, "promql_expr_test": asked}]}))
    done = subprocess.run([find("promtool"), "test", "rules", file], capture_output=True, timeout=60, check=False)
    assert bool(done.returncode) == is_wrong, done.stdout


def test_frontends_are_full_unless_the_slim_ones_are_asked_for(tmp_path: Path) -> None:
    slim = values_of(tmp_path, frontend={"image": {"repository": "registry.example/semel-frontend", "variant": "slim"}})
    found = [one for values in (None, slim) for one in render(values) if one["kind"] == "Deployment"]
    images = [one["spec"]["template"]["spec"]["containers"][0]["image"].rpartition(":")[0] for one in found]
    assert images == ["semel-frontend", "semel-worker", "registry.example/semel-frontend-slim", "semel-worker"]


def test_the_example_with_two_gpus_gives_each_worker_two_and_shared_memory() -> None:
    (path,) = [one for one in EXAMPLES if one.stem == "qwen3-vl-tp2"]
    (pod,) = [
        one["spec"]["template"]["spec"]
        for one in render(path)
        if one["kind"] == "Deployment" and "worker" in one["metadata"]["name"]
    ]
    (worker,) = pod["containers"]
    assert "--tensor-parallel-size=2" in worker["args"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert {"medium": "Memory", "sizeLimit": "16Gi"} in [volume.get("emptyDir") for volume in pod["volumes"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        {"frontend": {"replica": 3}},
        {"groups": []},
        {"groups": [{"name": "A_1", "replicas": 1, "resources": {}}]},
        {"discovery": "zookeeper"},
        {"secrets": {"frontendKeys": ""}},
        {"secrets": {"workerKeys": {"name": "n", "key": "k"}}},
        {"frontend": {"drainSeconds": "2m"}},
        {"podSecurity": {"userId": 0}},
        {"frontend": {"image": {"variant": "thin"}}},
        {"embeddingStore": {"nodes": ["valkeys://store.example"]}},
        {"embeddingStore": {"nodes": ["valkeys://semel:password@store.example:6380"]}},
        {"traces": {"endpoint": "collector:4318"}},
        {"media": {"store": "/srv/files"}},
        {"model": {"volume": {"hostPath": {"path": "/m"}, "nfs": {}, "persistentVolumeClaim": None}}},
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"values don't meet the specifications|validation"):
        render(values_of(tmp_path, **wrong))


def notes(*flags: object) -> str:
    done = helm("install", "demo", CHART, "--dry-run=client", "--namespace", "ml", *flags)
    return done.stdout.partition("NOTES:")[2]


def test_notes_say_what_is_open(tmp_path: Path) -> None:
    values = values_of(tmp_path, secrets={"apiKeys": {"name": "", "key": "k"}}, networkPolicy={"enabled": False})
    noted = [notes(), notes("--values", values)]
    assert ["everyone who reaches the service" in one for one in noted] == [False, True]
    assert ["There are no network policies" in one for one in noted] == [False, True]


@pytest.mark.parametrize("has_keys", [True, False])
def test_the_first_question_of_the_notes_can_be_pasted(tmp_path: Path, *, has_keys: bool) -> None:
    """Programs in place of kubectl and curl: one has the Secret, the other keeps what it is given."""
    api_keys = {"name": "clients" if has_keys else "", "key": "api.keys"}
    said = notes("--values", values_of(tmp_path, secrets={"apiKeys": api_keys}))
    script = re.split(r"\n\n(?! )", said.partition("image of yours:\n\n")[2])[0]
    secret = base64.b64encode(b"# clients\n\nh sha256:00\nacme 0123456789abcdef\nother fedcba9876543210\n").decode()
    for name, text in {
        "kubectl": f'[ "$7" = "jsonpath={{.data[\'api\\.keys\']}}" ] && printf %s {secret}',
        "curl": 'printf "%s\\n" "$@" > arguments; cat > body',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "photo.jpg").write_bytes(bytes(range(256)) * 1024)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, env={"PATH": path}, check=True, timeout=60)
    body = json.loads((tmp_path / "body").read_bytes())
    (image, _) = body["messages"][0]["content"]
    assert body["model"] == "Qwen/Qwen3-VL-8B-Instruct"
    assert base64.b64decode(image["image_url"]["url"].partition(",")[2]) == (tmp_path / "photo.jpg").read_bytes()
    asked = (tmp_path / "arguments").read_text()
    assert "/v1/chat/completions" in asked
    assert ("Authorization: Bearer 0123456789abcdef\n" in asked) == ("Authorization" in asked) == has_keys


def test_the_chart_has_the_version_of_semel() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version.partition(".dev")[0]
