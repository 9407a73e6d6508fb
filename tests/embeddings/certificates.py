"""A throw-away authority, for a server with TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import trustme


@dataclass(frozen=True)
class Authority:
    """An authority, and a server's certificate of it, as files."""

    root: Path
    certificate: Path
    private_key: Path

    @classmethod
    def create(cls, home: Path, *names: str) -> Self:
        home.mkdir(parents=True, exist_ok=True)
        made = cls(home / "root.pem", home / "server.pem", home / "server.key")
        authority = trustme.CA()
        server = authority.issue_cert(*names or ("localhost", "127.0.0.1"))
        authority.cert_pem.write_to_path(made.root)
        server.private_key_pem.write_to_path(made.private_key)
        for pem in server.cert_chain_pems:
            pem.write_to_path(made.certificate, append=True)
        return made

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.root)
