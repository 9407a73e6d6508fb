"""The Helm chart as its user sees it: rendered by Helm, and what is wrong with the objects that come out."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema_rs
import kubernetes_validate
import yaml

from semel.embeddings.address import StoreAddress
from semel.fleet.endpoint_slices import ServicePort
from semel.telemetry import METRICS
from tests.commands import root_command

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy" / "helm" / "semel"
HELM = Path(sys.executable).parent / "helm"
VERSIONS = ("1.29", "1.34", "1.37")
OF_VLLM = ("--served-model-name", "--max-model-len", "--tensor-parallel-size")

Object = dict[str, Any]

_METADATA = {"type": "object", "required": ["name", "namespace", "labels"]}


def _exactly(required: Sequence[str] = (), **properties: object) -> Object:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": [*(required or properties)],
    }


def _listed(items: object) -> Object:
    return {"type": "array", "minItems": 1, "items": items}


_TEXT, _COUNT, _MAP = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}, {"type": "object"}
CUSTOM: Mapping[str, Object] = {
    "ServiceMonitor": _exactly(
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind=_TEXT,
        metadata=_METADATA,
        spec=_exactly(
            jobLabel=_TEXT,
            selector=_exactly(matchLabels=_MAP),
            endpoints=_listed(_exactly(port=_TEXT, path=_TEXT, interval=_TEXT)),
        ),
    ),
    "ScaledObject": _exactly(
        apiVersion={"const": "keda.sh/v1alpha1"},
        kind=_TEXT,
        metadata=_METADATA,
        spec=_exactly(
            scaleTargetRef=_exactly(name=_TEXT),
            minReplicaCount=_COUNT,
            maxReplicaCount=_COUNT,
            fallback=_exactly(failureThreshold=_COUNT, replicas=_COUNT, behavior=_TEXT),
            advanced=_exactly(horizontalPodAutoscalerConfig=_exactly(behavior=_MAP)),
            triggers=_listed(
                _exactly(
                    type={"const": "prometheus"},
                    metricType={"const": "AverageValue"},
                    metadata=_exactly(serverAddress=_TEXT, query=_TEXT, threshold=_TEXT),
                )
            ),
        ),
    ),
}
"""The fields that the chart uses of two custom resources, by their documentation: Kubernetes' schemas have neither."""

kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
"""Else it would read megabytes of schemas for each object."""


def helm(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(HELM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def render(values: Path | None = None, *flags: str, chart: Path = CHART) -> list[Object]:
    """Return the objects of a release; a `ValueError` with Helm's words if there are none."""
    done = helm("template", "demo", chart, "--namespace", "ml", *(("--values", values) if values else ()), *flags)
    if done.returncode:
        raise ValueError(done.stderr)
    return [found for found in yaml.load_all(done.stdout, yaml.CSafeLoader) if found]


def faults_in(objects: Sequence[Object], version: str = VERSIONS[1]) -> list[str]:
    """Return all that is wrong with them for a version of Kubernetes, each with the name of its object."""
    checks: dict[str, Callable[[Object, Sequence[Object]], Iterable[str]]] = {
        "Deployment": _deployment_faults,
        "Service": _service_faults,
        "PodDisruptionBudget": _selector_faults,
        "NetworkPolicy": _policy_faults,
        "HorizontalPodAutoscaler": _scaler_faults,
        "ScaledObject": _scaled_object_faults,
        "ServiceMonitor": _monitor_faults,
        "Role": _role_faults,
        "Secret": _secret_faults,
    }
    found = [*_schema_faults(objects, version), *_names(objects)]
    for one in objects:
        if (check := checks.get(one["kind"])) is not None:
            found += [f"{one['kind']} {one['metadata']['name']}: {fault}" for fault in check(one, objects)]
    return found


def _secret_faults(_: Object, __: Sequence[Object]) -> Iterator[str]:
    yield "a key is in the chart"


def _of(objects: Sequence[Object], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def _schema_faults(objects: Sequence[Object], version: str) -> Iterator[str]:
    for one in objects:
        if (custom := CUSTOM.get(one["kind"])) is not None:
            errors = jsonschema_rs.validator_for(custom).iter_errors(one)
            yield from (f"{one['kind']} {one['metadata']['name']}: {error}" for error in errors)
            continue
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{one['kind']} {one['metadata']['name']}: in {version} {error.message} at {list(error.path)}"


def _names(objects: Sequence[Object]) -> Iterator[str]:
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    yield from (f"{kind} {name}: twice" for kind, name in set(names) if names.count((kind, name)) > 1)
    yield from (f"{kind} {name}: its name is too long" for kind, name in names if len(name) > 63)


def _deployment_faults(one: Object, objects: Sequence[Object]) -> Iterator[str]:
    pod = one["spec"]["template"]["spec"]
    labels = one["spec"]["template"]["metadata"]["labels"]
    if not _fits(one["spec"]["selector"]["matchLabels"], labels):
        yield "its selector does not fit its pods"
    accounts = {other["metadata"]["name"] for other in _of(objects, "ServiceAccount")}
    if pod.get("serviceAccountName") not in accounts:
        yield "its service account is not there"
    for container in pod["containers"]:
        yield from _container_faults(container, pod)
        yield from _flag_faults(container, pod, objects)
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        if not any(_selects(other, one) for other in _of(objects, kind)):
            yield f"no {kind} is for it"


def _scaler_faults(one: Object, objects: Sequence[Object]) -> Iterator[str]:
    target = one["spec"]["scaleTargetRef"]["name"]
    scaled = [other for other in _of(objects, "Deployment") if other["metadata"]["name"] == target]
    if not scaled:
        yield f"scales {target}, which is not there"
    yield from ("its Deployment has replicas too" for other in scaled if "replicas" in other["spec"])


def _scaled_object_faults(one: Object, objects: Sequence[Object]) -> Iterator[str]:
    """Yield the faults of any scaler, and queries of other metrics or other pods than those of its Deployment."""
    yield from _scaler_faults(one, objects)
    known = {metric.name for metric in METRICS} | {"vllm:num_requests_waiting"}
    target, namespace = one["spec"]["scaleTargetRef"]["name"], one["metadata"]["namespace"]
    for trigger in one["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        asked = {*re.findall(r"(?:semel_|vllm:)\w+", query)}
        yield from (f"nobody exports {name}" for name in asked - known)
        if not asked or {*re.findall(r'namespace="([^"]*)"', query)} != {namespace}:
            yield f"asks for other namespaces: {query}"
        names = [other["metadata"]["name"] for other in _of(objects, "Deployment")]
        for pattern in re.findall(r'pod=~"([^"]*)"', query) or [""]:
            if [name for name in names if re.fullmatch(pattern, f"{name}-7c9d8b5f4-x2x4z")] != [target]:
                yield f"asks for other pods: {query}"


def _monitor_faults(one: Object, objects: Sequence[Object]) -> Iterator[str]:
    """Endpoints that no Service has, and Deployments without one."""
    wanted = one["spec"]["selector"]["matchLabels"]
    services = [other for other in _of(objects, "Service") if _fits(wanted, other["metadata"]["labels"])]
    scraped = {endpoint["port"] for endpoint in one["spec"]["endpoints"]}
    chosen = [other for other in services if scraped & {port["name"] for port in other["spec"]["ports"]}]
    for other in _of(objects, "Deployment"):
        if not any(_fits(service["spec"]["selector"], _labels(other)) for service in chosen):
            yield f"{other['metadata']['name']} is not scraped"
    for port in scraped - {port["name"] for other in services for port in other["spec"]["ports"]}:
        yield f"no Service has the port {port}"
    if any(other["spec"].get("clusterIP") != "None" for other in chosen):
        yield "metrics are at the Service of requests"
    if any(one["spec"]["jobLabel"] not in other["metadata"]["labels"] for other in chosen):
        yield "its job has no name"


def _role_faults(one: Object, _: Sequence[Object]) -> Iterator[str]:
    granted = [(rule["apiGroups"], rule["resources"], rule["verbs"]) for rule in one["rules"]]
    if granted != [(["discovery.k8s.io"], ["endpointslices"], ["list", "watch"])]:
        yield f"grants {granted}"


def _container_faults(container: Object, pod: Object) -> Iterator[str]:
    own, shared = container.get("securityContext", {}), pod.get("securityContext", {})
    wanted = {
        "read-only root": own.get("readOnlyRootFilesystem") is True,
        "no more privileges": own.get("allowPrivilegeEscalation") is False,
        "no capabilities": own.get("capabilities") == {"drop": ["ALL"]},
        "a user that is not root": shared.get("runAsNonRoot") is True and shared.get("runAsUser", 0) > 0,
        "the group of its user": shared.get("fsGroup") == shared.get("runAsUser"),
        "seccomp": shared.get("seccompProfile") == {"type": "RuntimeDefault"},
        "requests and a limit of memory": "memory" in container["resources"].get("limits", {})
        and {"cpu", "memory"} <= container["resources"].get("requests", {}).keys(),
        "secrets that only its group reads": all(
            volume["secret"]["defaultMode"] == 0o440 for volume in pod["volumes"] if "secret" in volume
        ),
    }
    yield from (f"has not: {name}" for name, is_so in wanted.items() if not is_so)
    ports = {port["name"] for port in container["ports"]}
    for probe, path in (("startupProbe", "/health"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        asked = container.get(probe, {}).get("httpGet", {})
        if asked.get("path") != path or asked.get("port") not in ports:
            yield f"{probe} asks {asked.get('path')} at {asked.get('port')}"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    if mounted != volumes:
        yield f"mounts {sorted(mounted)} of {sorted(volumes)}"


def _flag_faults(container: Object, pod: Object, objects: Sequence[Object]) -> Iterator[str]:
    """Flags that semel does not have, or that do not fit the other objects."""
    try:
        values, others = _parsed(container["name"], container["args"])
    except Exception as error:  # noqa: BLE001 whatever its parser says
        yield f"its flags: {error}"
        return
    yield from (f"its flags: {other}" for other in others if other.partition("=")[0] not in OF_VLLM)
    drains = values["drain-delay-s"] + values["drain-s"]
    if not values["drain-delay-s"]:
        yield "it refuses requests in the moment of its SIGTERM"
    if pod.get("terminationGracePeriodSeconds", 30) < drains + 10:
        yield "it is killed while it drains"
    listening = {values[name] for name in ("port", "metrics-port", "admin-port") if values.get(name)}
    if listen := values.get("listen"):
        listening.add(int(listen.rpartition(":")[2]))
    if listening != (ports := {port["containerPort"] for port in container["ports"]}):
        yield f"it listens at {sorted(listening)} and tells {sorted(ports)}"
    paths = {name: value for name, value in values.items() if isinstance(value, Path)}
    files = {value if name == "key-dir" else value.parent for name, value in paths.items()}
    if not files <= {Path(mount["mountPath"]) for mount in container["volumeMounts"]}:
        yield f"it reads {sorted(map(str, files))}, which is not mounted"
    yield from _discovery_faults(container["name"], values, pod, objects)


def _parsed(name: str, arguments: Sequence[str]) -> tuple[dict[str, Any], Sequence[str]]:
    """Return what a command's own flags say, and what it would hand on to vLLM."""
    command = root_command().commands[name]
    parsed = command.make_context(name, [*arguments])
    values = {}
    for one in command.flags:
        match parsed.params[one.key]:
            case str() as text:
                values[one.name] = one.parse(text)
            case list() as texts:
                values[one.name] = [one.parse(text) for text in texts]
            case _:
                values[one.name] = one.default
    return values, parsed.args


def _discovery_faults(name: str, values: dict[str, Any], pod: Object, objects: Sequence[Object]) -> Iterator[str]:
    for text in values.get("worker-endpoint-slices") or ():
        yield from _slices_faults(ServicePort.parse(text), objects)
    if bool(values.get("worker-endpoint-slices")) != bool(pod["automountServiceAccountToken"]):
        yield "it has a token that it does not need, or none that it needs"
    if name == "frontend" and not (values.get("worker-endpoint-slices") or values.get("worker-dns")):
        yield "it knows no worker"


def _slices_faults(wanted: ServicePort, objects: Sequence[Object]) -> Iterator[str]:
    places = {(one["metadata"]["namespace"], one["metadata"]["name"]): one for one in _of(objects, "Service")}
    if (found := places.get((wanted.namespace, wanted.service))) is None:
        yield f"it watches {wanted}, which is not there"
    elif wanted.port not in {port["name"] for port in found["spec"]["ports"]}:
        yield f"it watches {wanted}, which has no such port"
    elif found["spec"].get("clusterIP") != "None":
        yield f"{wanted} is not headless"


def _service_faults(one: Object, objects: Sequence[Object]) -> Iterator[str]:
    behind = [other for other in _of(objects, "Deployment") if _fits(one["spec"]["selector"], _labels(other))]
    if len(behind) != 1:
        yield f"it has {len(behind)} deployments behind it"
    for other in behind:
        names = _ports(other)
        yield from (
            f"no port is {port['targetPort']}" for port in one["spec"]["ports"] if port["targetPort"] not in names
        )


def _selector_faults(one: Object, objects: Sequence[Object]) -> Iterator[str]:
    chosen = [other for other in _of(objects, "Deployment") if _selects(one, other)]
    if not chosen:
        yield "it is for no pods"


def _policy_faults(one: Object, objects: Sequence[Object]) -> Iterator[str]:
    yield from _selector_faults(one, objects)
    chosen = [other for other in _of(objects, "Deployment") if _selects(one, other)]
    for rule in one["spec"].get("ingress", ()):
        for port in rule["ports"]:
            yield from (f"no port is {port['port']}" for other in chosen if port["port"] not in _ports(other))
    for rule in one["spec"].get("ingress", ()):
        for peer in rule.get("from", ()):
            wanted = peer.get("podSelector", {}).get("matchLabels", {})
            if wanted and not any(_fits(wanted, _labels(other)) for other in _of(objects, "Deployment")):
                yield f"it lets in {wanted}, which nobody is"
    if one["spec"]["policyTypes"] != ["Ingress", "Egress"]:
        yield "it leaves a direction open"
    yield from _egress_faults(one["spec"]["egress"], chosen)
    if all(_is_worker(other) for other in chosen) and not all(rule.get("from") for rule in one["spec"]["ingress"]):
        yield "everybody reaches workers"


def _egress_faults(rules: Sequence[Object], chosen: Sequence[Object]) -> Iterator[str]:
    """Ports that the flags of these pods name and no rule opens; and rules that nothing needs."""
    open_ports = {port["port"] for rule in rules for port in rule.get("ports", ())}
    if not all(rule.get("ports") for rule in rules):
        yield "it opens every port"
    for other in chosen:
        needed = _remote_ports(other)
        yield from (f"{other['metadata']['name']} cannot reach port {port}" for port in sorted(needed - open_ports))
        if _is_worker(other) and rules and not needed:
            yield "workers reach others"


def _remote_ports(deployment: Object) -> set[int]:
    """The ports that the flags of its pods need on other hosts: of a store, a collector, a bucket, media and DNS."""
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    try:
        values, _ = _parsed(container["name"], container["args"])
    except Exception:  # noqa: BLE001 what its parser says is reported with its Deployment
        return set()
    ports = {StoreAddress.parse(node).port for node in (values.get("embedding-store") or "").split(",") if node}
    if endpoint := values.get("otlp-traces-endpoint"):
        ports.add(urlsplit(endpoint).port or 4318)
    if values.get("allowed-media-domains") or "://" in (values.get("media-store") or ""):
        ports.add(443)
    return ports | {53} if ports or not _is_worker(deployment) else ports


def _is_worker(deployment: Object) -> bool:
    return _labels(deployment)["app.kubernetes.io/component"] == "worker"


def _selects(one: Object, deployment: Object) -> bool:
    spec = one["spec"]
    return _fits(spec.get("podSelector", spec.get("selector", {})).get("matchLabels", {}), _labels(deployment))


def _fits(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return bool(wanted) and wanted.items() <= labels.items()


def _labels(deployment: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return found


def _ports(deployment: Object) -> set[str]:
    return {port["name"] for one in deployment["spec"]["template"]["spec"]["containers"] for port in one["ports"]}
