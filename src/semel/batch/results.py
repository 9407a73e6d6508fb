"""The file of results: one line for each request that was answered, in the order of the answers.

What a killed client has left of its last line is cut off when the file is opened, and its request is sent again. A
result's id has the number and the digest of its line, which is what a later run knows it by. One client at a time has
the file.
"""

from __future__ import annotations

import fcntl
import json
import os
from array import array
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import msgspec

from semel.batch.lines import Line, check_file
from semel.errors import ConfigError, ServiceError

__all__ = ["Results"]

_PREFIX: Final = "batch_req_"
_OK: Final = 200
_BEGIN: Final = f'{{"id":"{_PREFIX}'.encode()


class _Response(msgspec.Struct):
    status_code: int


class _Result(msgspec.Struct):
    id: str
    response: _Response | None = None

    @property
    def is_good(self) -> bool:
        return self.response is not None and self.response.status_code == _OK


class Results:
    """The results of a batch file, open for more."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digests = array("Q")
        """Of the lines with a result, by their numbers; 0 for the others."""

        self.count = 0
        self.failed = 0
        """Those without status 200."""

    @classmethod
    def open(cls, path: Path, *, drop_errors: bool = False) -> Self:
        """Open a file or make it. A `ConfigError` says that it is in use, or is no file of results.

        Results with errors can be dropped: the file is replaced by one without them.
        """
        try:
            check_file(path)
            results = cls(path.open("a+b", buffering=0))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        try:
            results._begin()
            if drop_errors and results.failed:
                results._drop_errors(path)
                results.close()
                return cls.open(path)
        except BaseException:
            results.close()
            raise
        return results

    def has(self, number: int, digest: int) -> bool:
        """Return whether a line has a result. Another line under its number is a `ConfigError`."""
        known = self._digests[number] if number < len(self._digests) else 0
        if known not in (0, digest):
            raise ConfigError(
                f"{self._file.name} has the result of another line {number}: the batch file has changed since, so name "
                "another file for its results"
            )
        return known != 0

    def put(self, line: Line, custom_id: str | None, response: dict[str, Any] | None, error: Any = None) -> None:
        """Write the result of a line: all of it, or a `ServiceError` says why that cannot be."""
        name = f"{_PREFIX}{line.number}_{line.digest:016x}"
        result = {"id": name, "custom_id": custom_id, "response": response, "error": error}
        data = memoryview(json.dumps(result, separators=(",", ":")).encode() + b"\n")
        end = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as failed:
            os.ftruncate(self._file.fileno(), end)  # another result may follow, and would be on the same line
            raise ServiceError(f"{self._file.name}: {failed.strerror}; then the same command goes on") from None
        self._note(line.number, line.digest, is_good=response is not None and response["status_code"] == _OK)

    def close(self) -> None:
        """Close the file, for another client."""
        self._file.close()

    def _begin(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_it = os.path.samestat(os.fstat(self._file.fileno()), Path(self._file.name).stat())
        except OSError:
            is_it = False
        if not is_it:  # it is locked, or was replaced by the client that had it
            raise ConfigError(f"{self._file.name}: another `semel batch` writes to it")
        end = 0
        with Path(self._file.name).open("rb") as file:
            for place, data in enumerate(file, start=1):
                if data.endswith(b"\n"):
                    self._read(data, place)
                    end += len(data)
                elif data[: len(_BEGIN)] != _BEGIN[: len(data)]:
                    raise self._foreign(place)
        os.ftruncate(self._file.fileno(), end)

    def _drop_errors(self, path: Path) -> None:
        """Replace the file by one without the results that have errors, in an instant."""
        new = path.with_name(f"{path.name}.new")
        try:
            with Path(self._file.name).open("rb") as old, new.open("wb") as file:
                file.writelines(data for data in old if msgspec.json.decode(data, type=_Result).is_good)
                os.fsync(file.fileno())
            new.replace(path)
        except OSError as error:
            raise ConfigError(f"{new}: {error.strerror}") from None

    def _read(self, data: bytes, place: int) -> None:
        try:
            result = msgspec.json.decode(data, type=_Result)
            number, _, digest = result.id.removeprefix(_PREFIX).partition("_")
            self._note(int(number), int(digest, 16), is_good=result.is_good)
        except (msgspec.MsgspecError, ValueError, OverflowError):
            raise self._foreign(place) from None

    def _foreign(self, place: int) -> ConfigError:
        return ConfigError(f"{self._file.name}, line {place} is no result of `semel batch`: name another file")

    def _note(self, number: int, digest: int, *, is_good: bool) -> None:
        if (missing := number + 1 - len(self._digests)) > 0:
            self._digests.extend(array("Q", bytes(8 * missing)))
        self._digests[number] = digest
        self.count += 1
        self.failed += not is_good
