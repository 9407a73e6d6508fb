"""Preprocess images in a program of one's own, and hand the features to a worker before anybody asks for them.

    semel key fleet.key && semel key admin.key
    semel serve MODEL --fleet-key-file fleet.key --admin-port 9100 --admin-key-file admin.key
    python examples/preprocess_elsewhere.py MODEL --fleet-key-file fleet.key --admin-key-file admin.key pictures/*.png

A chat about one of these images is then a hit at its first sight: no frontend decodes, preprocesses or sends it.
`MODEL` is the folder of the model; the program needs its processor, neither its weights nor vLLM.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import semel
from semel.core import Media
from semel.processing import HfProcessor
from semel.processing.probes import proven_fingerprint, run_probes
from semel.settings.secrets import read_key


def main() -> None:
    """Preprocess and inject, and say what became of each image."""
    parser = argparse.ArgumentParser(description="Inject features that were preprocessed here.")
    parser.add_argument("model", type=Path)
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--admin", default="http://127.0.0.1:9100", help="the worker's admin address")
    parser.add_argument("--fleet-key-file", type=Path, required=True, help="the fleet key: digests are made with it")
    parser.add_argument("--admin-key-file", type=Path, required=True)
    given = parser.parse_args()

    admin_key = given.admin_key_file.read_text().strip()
    contract = semel.contract(given.admin, key=admin_key)
    processor = HfProcessor.load(given.model, contract.target)
    fingerprint = proven_fingerprint(processor.fingerprint, run_probes(processor))
    if fingerprint != contract.fingerprint:
        parser.error("this program and the worker differ in the model's processor, or in the versions it runs on")
    key = read_key(given.fleet_key_file)
    features, names = {}, {}
    for path in given.images:
        data = path.read_bytes()  # as clients will send them: the digest is that of the file, not of its pixels
        digest = semel.digest(
            data,
            key=key,
            modality="image",
            fingerprint=fingerprint,
            options={},  # the `mm_processor_kwargs` of requests
            tenant=semel.Tenant(),
        )
        features[digest] = processor.process(Media("image", data))
        names[digest.hex()] = path.name

    for outcome in semel.inject(given.admin, features, key=admin_key):
        print(f"{names[outcome.digest]}: {outcome.status} {outcome.reason or ''}".rstrip())


if __name__ == "__main__":
    main()
