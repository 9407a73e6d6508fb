"""`semel.contract` asks a worker what features it takes, `semel.inject` hands it some that were preprocessed elsewhere.

Synchronous, with the standard library. Both speak HTTP straight to the worker's admin address: no proxy of the
environment and no redirect ever sees the key.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from semel.core import Contract, Digest, Feature
from semel.errors import ConfigError, NotReady, ProtocolError, SemelError, WorkerLost, error_for
from semel.interchange.injection import Outcome, decode
from semel.interchange.safetensors import write

__all__ = ["contract", "inject"]

_PATH: Final = "/v1/mm_cache/"
_MAX_ANSWER_BYTES: Final = 64 << 20
_CONNECTIONS: Final = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


def contract(url: str, *, key: str, timeout_s: float = 10.0) -> Contract:
    """Return what a worker's engine expects of features: its `target` is what a processor has to be loaded for.

    `url`, `key` and errors are those of `inject`.
    """
    body = _ask(url, "GET", "contract", (), {}, key=key, timeout_s=timeout_s)
    try:
        return msgspec.json.decode(body, type=Contract)
    except (msgspec.MsgspecError, ValueError):
        raise _no_worker(url) from None


def inject(url: str, features: Mapping[Digest, Feature], *, key: str, timeout_s: float = 60.0) -> list[Outcome]:
    """Inject features under their digests; what became of each.

    `url` is the worker's admin address, such as `http://127.0.0.1:9100`, and `key` its admin key. `timeout_s` bounds
    each wait for the worker, not the whole call. Raises `ConfigError` if address or key are wrong, `RequestError` if
    the worker refuses all of it, `NotReady` if it cannot be reached, `WorkerLost` if it went away: some may then have
    been stored, and all may be sent again.
    """
    pieces = write(features)
    headers = {
        "Content-Type": "application/x-safetensors",
        "Content-Length": str(sum(len(piece) for piece in pieces)),
    }
    body = _ask(url, "POST", "inject", pieces, headers, key=key, timeout_s=timeout_s)
    try:
        return decode(body)
    except ProtocolError:
        raise _no_worker(url) from None


def _ask(
    url: str,
    method: str,
    what: str,
    pieces: Sequence[bytes | memoryview],
    headers: Mapping[str, str],
    *,
    key: str,
    timeout_s: float,
) -> bytes:
    """Return the body of a good answer; a worker may answer before all is sent, if it refuses."""
    address = _address(url)
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError("an admin key is printable ASCII; is this the content of the worker's --admin-key-file?")
    assert address.hostname is not None
    connection = _CONNECTIONS[address.scheme](address.hostname, address.port, timeout=timeout_s)
    path = address.path.rstrip("/") + _PATH + what
    with contextlib.closing(connection):
        try:
            connection.connect()
        except OSError as error:
            raise NotReady(f"nobody answers at {url} ({error}); is it the worker's admin address?") from error
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                every = {"Authorization": f"Bearer {key}", **headers}
                connection.request(method, path, iter(pieces) if pieces else None, every)
            response = connection.getresponse()
            body: bytes = response.read(_MAX_ANSWER_BYTES)
        except TimeoutError as error:
            raise WorkerLost(f"the worker at {url} did not answer in {timeout_s} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise WorkerLost(f"the worker at {url} broke the connection ({error!r})") from error
    if response.status != 200:
        raise _error(url, response.status, body)
    return body


def _address(url: str) -> SplitResult:
    try:
        address = urlsplit(url)
        usable = address.scheme in _CONNECTIONS and address.hostname and address.port != 0
    except ValueError:
        usable = False
    if not usable or address.username is not None or address.query or address.fragment:
        raise ConfigError(f"{url!r} is no admin address; one is http://HOST:PORT")
    return address


def _error(url: str, status: int, body: bytes) -> SemelError:
    try:
        error = json.loads(body)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return _no_worker(url)
    if status in (401, 403):
        return ConfigError(f"{url}: {message}")
    if status in (404, 405):
        return _no_worker(url)
    return error_for(code, message)


def _no_worker(url: str) -> ConfigError:
    return ConfigError(f"{url} does not answer as a worker's admin address does; is it that of a frontend?")
