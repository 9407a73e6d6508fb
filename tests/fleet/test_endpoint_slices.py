"""Which workers EndpointSlices name, beside a slow model of the rule and beside the rules that are wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

import msgspec
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from semel.errors import ConfigError
from semel.fleet.endpoint_slices import EndpointSlice, ServicePort, workers_in
from tests.effort import examples

WANTED = ServicePort("semel", "workers", "wire")
IPV4 = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
IPV6 = ("fd00::1", "fd00::2")


def model(
    slices: Sequence[EndpointSlice],
    *,
    sees_terminating: bool = True,
    joins_copies: bool = True,
    knows_pods: bool = True,
    ready_by_default: bool = True,
    one_family: bool = True,
) -> tuple[str, ...]:
    """The rule, pod by pod over all copies; each argument makes one of its parts wrong."""
    copies = []
    for one in slices:
        ports = [port.port for port in one.ports or () if port.name == "wire" and port.protocol in (None, "TCP")]
        if one.address_type not in ("IPv4", "IPv6") or len(ports) != 1:
            continue
        for endpoint in one.endpoints or ():
            for address in endpoint.addresses[:1]:
                told, reference = endpoint.conditions, endpoint.target_ref
                pod = reference.uid if knows_pods and reference and reference.uid else address
                is_ready = ready_by_default if told.ready is None else told.ready
                url = f"tcp://[{address}]:{ports[0]}" if one.address_type == "IPv6" else f"tcp://{address}:{ports[0]}"
                copies.append((pod, one.address_type, address, is_ready, bool(told.terminating), url))
    found = set()
    for pod in {copy[0] for copy in copies}:
        own = sorted({copy for copy in copies if copy[0] == pod}, key=lambda copy: (copy[1], copy[2], copy[5]))
        seen = own if joins_copies else [copy for copy in copies if copy[0] == pod][-1:]
        if any(copy[3] for copy in seen) and not (sees_terminating and any(copy[4] for copy in seen)):
            found |= {copy[5] for copy in (own[:1] if one_family else own)}
    return tuple(sorted(found))


def sets_of_slices(*, one_port: bool = False) -> st.SearchStrategy[list[EndpointSlice]]:
    tell = st.sampled_from([True, False, None])
    conditions = st.fixed_dictionaries({"ready": tell, "serving": tell, "terminating": tell})
    reference = st.sampled_from([None, {"kind": "Pod", "uid": "a"}, {"uid": "a"}, {"uid": "b"}, {"kind": "Pod"}])

    def slices(kind: str) -> st.SearchStrategy[dict[str, object]]:
        addresses = {"IPv4": IPV4, "IPv6": IPV6, "FQDN": ("worker.example",)}[kind]
        endpoint = st.fixed_dictionaries(
            {"addresses": st.lists(st.sampled_from(addresses), min_size=one_port, max_size=2)},
            optional={"conditions": conditions, "targetRef": reference, "zone": st.just("z")},
        )
        port = st.fixed_dictionaries(
            {"name": st.sampled_from(["wire", "other"]), "port": st.sampled_from([9000, 9001, None])},
            optional={"protocol": st.sampled_from(["TCP", "UDP"])},
        )
        usual = st.just([{"name": "wire", "port": 9000, "protocol": "TCP"}])
        ports = usual if one_port else usual | st.lists(port, max_size=2)
        return st.fixed_dictionaries(
            {"addressType": st.just(kind), "endpoints": st.none() | st.lists(endpoint, max_size=4), "ports": ports}
        )

    some = st.lists(
        st.sampled_from(["IPv4", "IPv6"] if one_port else ["IPv4", "IPv6", "FQDN"]).flatmap(slices), max_size=4
    )
    return some.map(
        lambda found: [
            msgspec.convert({"metadata": {"name": str(number)}, **one}, EndpointSlice)
            for number, one in enumerate(found)
            if all(port["port"] for port in one["ports"])  # type: ignore[attr-defined]
        ]
    )


@given(sets_of_slices())
@settings(max_examples=examples(150), deadline=None)
def test_slices_name_the_workers_that_the_model_names(slices: list[EndpointSlice]) -> None:
    assert workers_in(slices, WANTED) == model(slices)
    assert workers_in(reversed(slices), WANTED) == model(slices), "the order of slices says nothing"


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["sees_terminating", "joins_copies", "knows_pods", "ready_by_default", "one_family"])
def test_mutant_a_rule_that_leaves_a_part_out_is_found(wrong: str) -> None:
    found = find(
        sets_of_slices(one_port=True),
        lambda slices: workers_in(slices, WANTED) != model(slices, **{wrong: False}),
        settings=settings(max_examples=20_000, phases=[Phase.generate], database=None, deadline=None),
        random=Random(1),
    )
    assert workers_in(found, WANTED) == model(found)


def test_what_is_no_address_and_what_has_no_port_is_no_worker() -> None:
    endpoints = [{"addresses": ["10.0.0.1"]}, {"addresses": ["../../etc"]}, {"addresses": []}]
    ports = [
        {"name": "wire", "port": 9000},
        {"name": "wire", "port": 53, "protocol": "UDP"},
        {"name": "admin", "port": 9100},
    ]
    one = msgspec.convert(
        {"metadata": {"name": "s"}, "addressType": "IPv4", "endpoints": endpoints, "ports": ports}, EndpointSlice
    )
    answers = {port: workers_in([one], ServicePort("n", "s", port)) for port in ("wire", "admin", "7000", "none", "")}
    assert answers == {
        "wire": ("tcp://10.0.0.1:9000",),
        "admin": ("tcp://10.0.0.1:9100",),
        "7000": ("tcp://10.0.0.1:7000",),
        "none": (),
        "": (),  # it has two, and which is meant is not told
    }


@pytest.mark.parametrize("text", ["semel/workers", "semel/workers:9000", "a-1/b:wire"])
def test_a_service_is_written_as_it_was_read(text: str) -> None:
    assert str(ServicePort.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["workers", "/workers", "a/", "a/b:", "a/b:0", "a/b:65536", "A/b", "a/b/c", "a/b?c", "../b", "a/b:c:d", "-/b"],
)
def test_what_is_no_service_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match=f"NAMESPACE/SERVICE.*not '{re.escape(text)}'"):
        ServicePort.parse(text)
