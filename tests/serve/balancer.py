"""A real Envoy with the configuration that we ship, before frontends on this machine; and clients that see failures."""

from __future__ import annotations

import asyncio
import io
import json
import ssl
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import trustme
import yaml
from PIL import Image

from semel.lab.bench.ports import free_port
from tests.cells.balancers import envoy_command, running
from tests.serve.served import image_url

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deploy" / "envoy" / "envoy.yaml"
CHAT = "/v1/chat/completions"


def configuration(home: Path, port: int, frontends: Sequence[int]) -> dict[str, Any]:
    """What we ship, with other ports and other files for the certificate; nothing else is changed."""
    found: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    listener, cluster = found["static_resources"]["listeners"][0], found["static_resources"]["clusters"][0]
    listener["address"]["socket_address"] |= {"address": "127.0.0.1", "port_value": port}
    tls = listener["filter_chains"][0]["transport_socket"]["typed_config"]["common_tls_context"]
    for name, part in tls["tls_certificates"][0].items():
        part["filename"] = str(home / {"certificate_chain": "tls.crt", "private_key": "tls.key"}[name])
    endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert len(endpoints) == len(frontends)
    for endpoint, number in zip(endpoints, frontends, strict=True):
        endpoint["endpoint"]["address"]["socket_address"]["port_value"] = number
    return found


@dataclass(frozen=True)
class Balancer:
    """A running Envoy."""

    url: str
    trust: ssl.SSLContext
    log: Path

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=120, verify=self.trust, limits=limits)


@contextmanager
def balancing(home: Path, frontends: Sequence[int]) -> Iterator[Balancer]:
    authority, port, log = trustme.CA(), free_port(), home / "envoy.log"
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(home / "tls.crt"))
    certificate.private_key_pem.write_to_path(str(home / "tls.key"))
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    (home / "envoy.yaml").write_text(yaml.safe_dump(configuration(home, port, frontends)))
    url = f"https://127.0.0.1:{port}"
    with running(envoy_command(home / "envoy.yaml"), url, log, trust):
        yield Balancer(url, trust, log)


def large_picture(seed: int, pixels: int = 1_020) -> dict[str, Any]:
    """An image whose data URL has over 4 MB: noise does not become smaller."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 255, (pixels, pixels, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "PNG", compress_level=1)
    part = image_url(buffer.getvalue())
    assert len(part["image_url"]["url"]) > 4_000_000
    return part


def body_of(content: object, **fields: object) -> bytes:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0.0, **fields}
    return json.dumps(body).encode()


@dataclass
class Load:
    """Clients that ask one after another, until they are told to stop; what became of their requests."""

    client: httpx.AsyncClient
    bodies: Sequence[bytes]
    pause_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def answered(self) -> int:
        return self.outcomes["answered"]

    async def run(self, clients: int) -> None:
        await asyncio.gather(*(self._ask(number) for number in range(clients)))

    async def _ask(self, number: int) -> None:
        while not self.stopping.is_set():
            body = self.bodies[number % len(self.bodies)]
            number += 1
            try:
                outcome = await self._answer(body)
            except httpx.HTTPError as error:
                outcome = repr(error)
            self.outcomes["answered" if not outcome else "failed"] += 1
            if outcome:
                self.failures.append(outcome)
            await asyncio.sleep(self.pause_s)

    async def _answer(self, body: bytes) -> str:
        """What is wrong with the answer; nothing if nothing is."""
        headers = {"content-type": "application/json"}
        async with self.client.stream("POST", CHAT, content=body, headers=headers) as response:
            text = (await response.aread()).decode()
        if response.status_code != 200:
            return f"{response.status_code}: {text[:200]}"
        if b'"stream": true' in body[-40:]:
            return "" if text.rstrip().endswith("data: [DONE]") else f"cut off: {text[-200:]}"
        return "" if json.loads(text)["choices"] else f"empty: {text[:200]}"


def large_bodies(count: int, max_tokens: int) -> list[bytes]:
    """Requests with an image of 4 MB each; every second one is streamed."""
    question = {"type": "text", "text": "What is it?"}
    return [
        body_of([large_picture(seed), question], max_tokens=max_tokens, **({"stream": True} if seed % 2 else {}))
        for seed in range(count)
    ]
