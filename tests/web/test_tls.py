"""TLS with vLLM's flags: files that make no sense are named, clients connect, and a new certificate is taken (S25)."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import trustme

from semel.errors import ConfigError
from semel.lab.bench.ports import free_port
from semel.web.server import HttpServer
from semel.web.tls import TlsSettings
from tests.embeddings.certificates import Authority
from tests.frontend.conftest import app, drawing
from tests.frontend.rig import Rig
from tests.render.conftest import folder, parts_renderer
from tests.waiting import until

__all__ = ["app", "drawing", "folder", "parts_renderer"]

KEY = "sk-0123456789abcdef"


def settings_of(authority: Authority, **more: object) -> TlsSettings:
    return TlsSettings(authority.certificate, authority.private_key, **more)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def serving(app: Rig, tls: TlsSettings) -> AsyncIterator[tuple[HttpServer, int]]:
    port = free_port()
    server = HttpServer(app.app, "127.0.0.1", port, tls=tls.context())
    async with server.running():
        await until(lambda: server._server.started)
        yield server, port


async def certificate_of(port: int, tls: ssl.SSLContext) -> bytes:
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname="localhost")
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return shown


async def test_the_openai_client_is_answered_over_tls(app: Rig, tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    async with serving(app, settings_of(authority)) as (_, port):
        http = openai.DefaultAsyncHttpxClient(verify=authority.client_context())
        url = f"https://localhost:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=http) as client:
            answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
            assert answer.choices[0].finish_reason == "stop"
        stranger = openai.DefaultAsyncHttpxClient(verify=ssl.create_default_context())
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=stranger) as client:
            with pytest.raises(openai.APIConnectionError):
                await client.models.list()


async def test_a_client_that_speaks_plain_http_gets_no_answer_and_does_no_harm(app: Rig, tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    async with serving(app, settings_of(authority)) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"200" not in await asyncio.wait_for(reader.read(), 20)
        writer.transport.abort()
        await until(lambda: server._admission.closed["handshake"] == 1)
        assert await certificate_of(port, authority.client_context())
        await until(lambda: len(server._admission) == 0)


async def test_a_client_without_a_certificate_is_refused_where_one_is_required(app: Rig, tmp_path: Path) -> None:
    authority = trustme.CA()
    own = Authority.create(tmp_path / "server")
    authority.cert_pem.write_to_path(tmp_path / "clients.pem")
    tls = settings_of(own, ca_certs=tmp_path / "clients.pem", cert_reqs=2)
    async with serving(app, tls) as (_, port):
        known, stranger = own.client_context(), own.client_context()
        authority.issue_cert("someone").configure_cert(known)
        for context, is_answered in ((known, True), (stranger, False)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
            answer = b""
            with contextlib.suppress(OSError):
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answer = await asyncio.wait_for(reader.read(), 20)
            writer.transport.abort()
            assert answer.startswith(b"HTTP/1.1 200 ") == is_answered


async def test_a_new_certificate_is_for_new_connections_and_old_ones_go_on(app: Rig, tmp_path: Path) -> None:
    first, second = Authority.create(tmp_path / "1"), Authority.create(tmp_path / "2")
    async with serving(app, settings_of(first)) as (server, port):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=first.client_context(), server_hostname="localhost"
        )
        context = settings_of(second).context()
        assert context is not None
        server.use_tls(context)
        assert await certificate_of(port, second.client_context())
        with pytest.raises(ssl.SSLCertVerificationError):
            await certificate_of(port, first.client_context())
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200 ")
        writer.transport.abort()


def test_files_that_make_no_sense_are_named_with_their_flag(tmp_path: Path) -> None:
    one, other = Authority.create(tmp_path / "1"), Authority.create(tmp_path / "2")
    text, nothing = tmp_path / "text", tmp_path / "nothing"
    text.write_text("no certificate")
    for wrong, complaint in (
        (TlsSettings(nothing), "--ssl-certfile .*nothing cannot be used: No such file"),
        (TlsSettings(text), "--ssl-certfile .*text cannot be used"),
        (TlsSettings(one.certificate), "--ssl-certfile"),
        (TlsSettings(one.certificate, other.private_key), "--ssl-keyfile .*another certificate's"),
        (TlsSettings(keyfile=one.private_key), "--ssl-keyfile needs a certificate"),
        (settings_of(one, cert_reqs=2), "--ssl-cert-reqs 2 needs --ssl-ca-certs"),
        (settings_of(one, ca_certs=text), "--ssl-ca-certs .*text cannot be used"),
        (settings_of(one, ciphers="none at all"), "--ssl-ciphers"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            wrong.context()
    assert TlsSettings().context() is None


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    made = Authority.create(tmp_path)
    key = load_pem_private_key(made.private_key.read_bytes(), None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    made.private_key.write_bytes(encrypted)
    with pytest.raises(ConfigError, match="the key is encrypted"):
        settings_of(made).context()
