"""TLS of a server: vLLM's flags, and the context that is made of the files that they name."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from semel.core.flag import Group, flag
from semel.errors import ConfigError

__all__ = ["TlsSettings"]


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The certificate of a server, and what it wants of its clients: vLLM's flags. Without one it speaks plain HTTP."""

    GROUP: ClassVar[Group] = "TLS"

    certfile: Path | None = flag(
        None,
        "ssl-certfile",
        help="Serve HTTPS with this certificate: a PEM file, intermediate certificates after it. It is "
        "reloaded when it changes.",
        is_common=True,
    )
    keyfile: Path | None = flag(
        None,
        "ssl-keyfile",
        help="Private key of the certificate, a PEM file.",
        is_common=True,
        default_text="in the certificate's file",
    )
    ca_certs: Path | None = flag(
        None, "ssl-ca-certs", help="CA certificates that client certificates are verified with, a PEM file."
    )
    cert_reqs: int = flag(
        0,
        "ssl-cert-reqs",
        help="Client certificates: 0 asks for none, 1 verifies one that is sent, 2 requires one, also for "
        "/health and /ready; those of --metrics-port need none.",
        min=0,
        max=2,
    )
    ciphers: str | None = flag(None, "ssl-ciphers", help="Cipher suites for TLS 1.2, in OpenSSL's notation.")
    enable_ssl_refresh: bool = flag(
        False, help="Accepted as a flag of vLLM; certificates are always reloaded when their files change."
    )

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that it reads."""
        return tuple(path for path in (self.certfile, self.keyfile, self.ca_certs) if path is not None)

    @property
    def is_on(self) -> bool:
        """Return whether the server speaks HTTPS."""
        return self.certfile is not None

    def context(self) -> ssl.SSLContext | None:
        """Read the files; None without a certificate. A `ConfigError` names the flag that has to change."""
        if self.certfile is None:
            if self.files:
                flag_name = "--ssl-keyfile" if self.keyfile is not None else "--ssl-ca-certs"
                raise ConfigError(f"{flag_name} needs a certificate: name it with --ssl-certfile")
            return None
        if self.cert_reqs and self.ca_certs is None:
            raise ConfigError(f"--ssl-cert-reqs {self.cert_reqs} needs --ssl-ca-certs: who signs clients' certificates")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certfile, self.keyfile, _no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--ssl-certfile {self.certfile}{self._key_text()} cannot be used: {_reason(error)}"
            ) from None
        self._trust(context)
        if self.ciphers is not None:
            try:
                context.set_ciphers(self.ciphers)
            except ssl.SSLError:
                raise ConfigError(f"--ssl-ciphers {self.ciphers}: OpenSSL has none of these") from None
        return context

    def _trust(self, context: ssl.SSLContext) -> None:
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except OSError as error:
                raise ConfigError(f"--ssl-ca-certs {self.ca_certs} cannot be used: {_reason(error)}") from None
        context.verify_mode = ssl.VerifyMode(self.cert_reqs)

    def _key_text(self) -> str:
        return "" if self.keyfile is None else f" with --ssl-keyfile {self.keyfile}"


def _no_password() -> str:
    """Called by OpenSSL, which would else ask at the terminal."""
    raise ValueError("the key is encrypted; store it without a password, readable by its owner only")


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"it is no such PEM file, or the key is another certificate's ({error.reason or 'no PEM'})"
    return (error.strerror or "it cannot be read") if isinstance(error, OSError) else str(error)
