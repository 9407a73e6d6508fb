"""EndpointSlices of Kubernetes, and the workers that they name. Pure: what reads them from an API server is elsewhere.

A pod may be in several slices at once, while Kubernetes moves it from one to another, and in slices of IPv4 and of
IPv6. It is one worker. What its copies say is joined: a pod that ends in one of them ends, since no pod comes back from
that; and it is ready if one of them says so. Another pod may get the address of one that ends: pods are known by
their uid, not by their address.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final, Self

from msgspec import Struct

from semel.errors import ConfigError

__all__ = [
    "Conditions",
    "Endpoint",
    "EndpointSlice",
    "Metadata",
    "Port",
    "ServicePort",
    "TargetRef",
    "workers_in",
]

_FAMILIES: Final = {"IPv4": 0, "IPv6": 1}  # the first is preferred; slices of names (`FQDN`) are of no pods
_MAX_PORT: Final = 65_535
_LABEL: Final = "([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)"
_FORM: Final = re.compile(f"{_LABEL}/{_LABEL}(?::{_LABEL})?")


class _Kubernetes(Struct, frozen=True, rename="camel"):
    """An object of Kubernetes, with names in its style. Fields that we do not read may be anything."""


class Conditions(_Kubernetes, frozen=True):
    """The conditions of an endpoint. A missing `ready` is true, a missing `terminating` false."""

    ready: bool | None = None
    terminating: bool | None = None


class TargetRef(_Kubernetes, frozen=True):
    """The pod behind an endpoint."""

    uid: str = ""


class Endpoint(_Kubernetes, frozen=True):
    """One pod of a service."""

    addresses: tuple[str, ...] = ()  # all reach the same pod; Kubernetes itself gives one
    conditions: Conditions = Conditions()
    target_ref: TargetRef | None = None


class Port(_Kubernetes, frozen=True):
    """A port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class Metadata(_Kubernetes, frozen=True):
    """The name and version of an object."""

    name: str = ""
    resource_version: str = ""


class EndpointSlice(_Kubernetes, frozen=True):
    """Some endpoints of a service."""

    metadata: Metadata
    address_type: str = ""
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[Port, ...] | None = None


@dataclass(frozen=True, slots=True)
class ServicePort:
    """A service, and the port of its pods that workers listen at: NAMESPACE/SERVICE[:PORT]."""

    namespace: str
    service: str
    port: str = ""  # a number, a port's name, or nothing for the only one that a slice has

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what stands on a command line."""
        found = _FORM.fullmatch(text)
        if found is None or (found[3] and found[3].isdecimal() and not 0 < int(found[3]) <= _MAX_PORT):
            raise ConfigError(
                f"--worker-endpoint-slices takes NAMESPACE/SERVICE or NAMESPACE/SERVICE:PORT, not {text!r}"
            )
        return cls(found[1], found[2], found[3] or "")

    def __str__(self) -> str:
        return f"{self.namespace}/{self.service}{self.port and ':'}{self.port}"

    def number_in(self, ports: Sequence[Port]) -> int | None:
        """Return the port of a slice's endpoints; None if the slice does not have it."""
        if self.port.isdecimal():
            return int(self.port)
        found = [one for one in ports if (one.protocol or "TCP") == "TCP" and self.port in ("", one.name)]
        return found[0].port if len(found) == 1 else None


@dataclass(slots=True)
class _Pod:
    """One pod, as all slices together describe it."""

    is_ready: bool = False
    is_terminating: bool = False
    places: list[tuple[int, str, int]] = field(default_factory=list)  # family, address and port


def workers_in(slices: Iterable[EndpointSlice], wanted: ServicePort) -> tuple[str, ...]:
    """Return the addresses of the workers that should get requests: of pods that are ready and do not end, once."""
    pods: dict[str, _Pod] = {}
    for one in slices:
        port = wanted.number_in(one.ports or ())
        family = _FAMILIES.get(one.address_type)
        if family is None or port is None:
            continue
        for endpoint in one.endpoints or ():
            if endpoint.addresses and _is_ip(address := endpoint.addresses[0]):
                uid = endpoint.target_ref.uid if endpoint.target_ref is not None else ""
                pod = pods.setdefault(uid or address, _Pod())
                pod.is_ready |= endpoint.conditions.ready is not False
                pod.is_terminating |= endpoint.conditions.terminating is True
                pod.places.append((family, address, port))
    living = (min(pod.places) for pod in pods.values() if pod.is_ready and not pod.is_terminating)
    return tuple(sorted({_url(*place) for place in living}))


def _url(family: int, address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if family else f"tcp://{address}:{port}"


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
