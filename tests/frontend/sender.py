"""A client in a process of its own: sends the same body several times and prints the statuses.

`python -m tests.frontend.sender PORT PATH FILE TIMES`
"""

from __future__ import annotations

import http.client
import sys
from pathlib import Path


def main(port: str, path: str, file: str, times: str) -> None:
    body = Path(file).read_bytes()
    headers = {"Content-Type": "application/json"}
    for _ in range(int(times)):
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=120)
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        response.read()
        connection.close()
        sys.stdout.write(f"{response.status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
