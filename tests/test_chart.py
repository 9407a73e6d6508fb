"""The Helm chart: linted and rendered by a real Helm, valid for three versions of Kubernetes, and held to the code."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart import CHART, ROOT, VERSIONS, faults_in, helm, render

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


SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "1 group": {"groups": groups(1)},
    "16 groups": {"groups": groups(16), "networkPolicy": {"monitoring": MONITORING}},
    "everything": {
        "groups": groups(2),
        "discovery": "dns",
        "secrets": {"apiKeys": {"name": "", "key": "k"}},
        "imagePullSecrets": [{"name": "registry"}],
        "frontend": {
            "extraArgs": ["--allowed-media-domains=images.example"],
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
            "mediaEgress": [{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}], "ports": [{"port": 443}]}],
        },
    },
    "scaled by requests": {"frontend": {"autoscaling": {"requestsInFlight": 256}}},
}


@pytest.mark.parametrize("name", SETTINGS)
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
    objects = render(values_of(tmp_path, groups=groups(16)))
    names = {f"demo-worker-gpu-{number}" for number in range(16)}
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


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutant_what_is_wrong_with_a_chart_is_found(name: str, tmp_path: Path) -> None:
    file, before, after = MUTATIONS[name]
    chart = shutil.copytree(CHART, tmp_path / "semel")
    text = (chart / file).read_text()
    assert before in text
    (chart / file).write_text(text.replace(before, after))
    try:
        faults = faults_in(render(chart=chart))
    except ValueError as error:
        faults = [str(error)]
    assert faults


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
        {"model": {"volume": {"hostPath": {"path": "/m"}, "nfs": {}, "persistentVolumeClaim": None}}},
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"values don't meet the specifications|validation"):
        render(values_of(tmp_path, **wrong))


def test_notes_say_what_is_open(tmp_path: Path) -> None:
    values = values_of(tmp_path, secrets={"apiKeys": {"name": "", "key": "k"}}, networkPolicy={"enabled": False})
    noted = [
        helm("install", "demo", CHART, "--dry-run=client", "--namespace", "ml", *flags).stdout.partition("NOTES:")[2]
        for flags in ((), ("--values", values))
    ]
    assert ["whoever reaches the service" in notes for notes in noted] == [False, True]
    assert ["There are no network policies" in notes for notes in noted] == [False, True]


def test_the_chart_has_the_version_of_semel() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version.partition(".dev")[0]
