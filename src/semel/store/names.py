"""Files of the media store as values, and the names of owners, files and objects. Pure.

One file is one object, written at once, and its name is all of its metadata::

    media-1/OWNER/ID/REVISION.CREATED.EXPIRES.MODALITY.PURPOSE.FILENAME

So a process that is killed leaves no file half named, there is nothing besides the objects that could disagree with
them, and a listing alone is enough to know every file. OWNER and ID are keyed with the fleet key (threats S11, S12):
a reader of the bucket learns no tenant's name from it, and a content that has been changed does not fit its ID.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final

from semel.core import Digest, Key, hash_parts
from semel.media.signature import FileKind

__all__ = [
    "MAX_NAME_BYTES",
    "PURPOSES",
    "ROOT",
    "StoredFile",
    "file_id",
    "matches_content",
    "object_folder",
    "object_path",
    "owner_name",
    "parse_id",
    "parse_object_path",
    "public_id",
    "short_name",
]

ROOT: Final = "media-1"
PURPOSES: Final = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
"""The purposes of OpenAI's API. semel treats them alike."""

MAX_NAME_BYTES: Final = 96
"""Of a file name, in UTF-8: encoded, an object's name stays within 255 bytes, which is what disks take."""

_OWNER_DOMAIN: Final = b"semel.owner.1"
_FILE_DOMAIN: Final = b"semel.file.1"
_OWNER_BYTES: Final = 16
_OTHER: Final = "other"
_KINDS: Final[dict[str, FileKind]] = {"document": "document", "audio": "audio", "image": "image", "video": "video"}
_PREFIX: Final = "file-"
_ID: Final = re.compile(rf"{_PREFIX}([0-9a-f]{{{2 * Digest.size}}})", re.ASCII)
_PATH: Final = re.compile(
    rf"{ROOT}/(?P<owner>[0-9a-f]{{16}}-[0-9a-f]{{{2 * _OWNER_BYTES}}})/(?P<id>[0-9a-f]{{{2 * Digest.size}}})/"
    rf"(?P<revision>\d{{1,9}})\.(?P<created>\d{{1,12}})\.(?P<expires>\d{{1,12}})\."
    rf"(?P<modality>audio|document|image|other|video)\.(?P<purpose>{'|'.join(PURPOSES)})\."
    r"(?P<name>[A-Za-z0-9_-]{0,128})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Everything that is known of a file without reading it: its object's name and size say all of it."""

    id: Digest
    """Keyed by its owner and its content: no two owners have a file in common."""

    owner: str
    """A tenant, as `owner_name` calls it."""

    nbytes: int
    revision: int
    """Number of uploads. Of two objects of one file, the one with the higher revision counts."""

    created_s: int
    """Time of the first upload, in seconds since 1970."""

    expires_s: int
    modality: FileKind | None
    """The kind as which a chat uses it; None if it cannot."""

    purpose: str
    name: str
    """As its client called it."""


def owner_name(tenant: str, key: Key) -> str:
    """Return what a tenant is called in the store. Fleets with different keys have different owners."""
    return f"{key.id}-{hash_parts((_OWNER_DOMAIN, tenant.encode()), key).hexdigest(length=_OWNER_BYTES)}"


def file_id(content: bytes, tenant: str, key: Key) -> Digest:
    """Return the id of a file of a tenant; `content` is the blake3 hash of its bytes."""
    return Digest(hash_parts((_FILE_DOMAIN, tenant.encode(), content), key).digest())


def matches_content(digest: Digest, content: bytes, tenant: str, key: Key) -> bool:
    """Return whether bytes with this hash are those of the file."""
    return compare_digest(digest, file_id(content, tenant, key))


def public_id(digest: Digest) -> str:
    """Return the id as clients know it."""
    return f"{_PREFIX}{digest.hex()}"


def parse_id(text: str) -> Digest | None:
    """Return the id that a client has written; None if it cannot be one."""
    return Digest(bytes.fromhex(found[1])) if (found := _ID.fullmatch(text)) else None


def short_name(name: str) -> str:
    """Cut a file name to what is stored: its beginning, and its extension."""
    name = "".join(char for char in name if char.isprintable()).rpartition("/")[2]
    if len(raw := name.encode(errors="replace")) <= MAX_NAME_BYTES:
        return raw.decode()
    stem, dot, extension = raw.rpartition(b".")
    end = dot + extension if stem and len(extension) <= 16 else b""
    return (raw[: MAX_NAME_BYTES - len(end)] + end).decode(errors="ignore")


def object_folder(owner: str, digest: Digest) -> str:
    """Return where the object of a file is; for a moment there may be two."""
    return f"{ROOT}/{owner}/{digest.hex()}"


def object_path(file: StoredFile) -> str:
    """Return the name of a file's object."""
    name = urlsafe_b64encode(file.name.encode()).rstrip(b"=").decode()
    fields = (file.revision, file.created_s, file.expires_s, file.modality or _OTHER, file.purpose, name)
    return f"{object_folder(file.owner, file.id)}/{'.'.join(map(str, fields))}"


def parse_object_path(path: str, nbytes: int) -> StoredFile | None:
    """Return the file whose object is called so; None if it is none of ours."""
    if (found := _PATH.fullmatch(path)) is None:
        return None
    encoded = found["name"]
    try:
        name = urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    except ValueError:
        return None
    return StoredFile(
        id=Digest(bytes.fromhex(found["id"])),
        owner=found["owner"],
        nbytes=nbytes,
        revision=int(found["revision"]),
        created_s=int(found["created"]),
        expires_s=int(found["expires"]),
        modality=_KINDS.get(found["modality"]),
        purpose=found["purpose"],
        name=name,
    )
