"""Features that are made outside of the fleet, as a framework would that injects them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from semel.core import Contract, Digest, Feature, Key, Media, digest
from semel.processing import HfProcessor
from semel.wire.events import Reset
from semel.wire.zmq import Connected, FrontendLink

CONNECT_S = 20.0


async def contract_of(address: str, key: Key) -> Contract:
    """What a worker tells whoever connects to it."""
    async with asyncio.timeout(CONNECT_S), FrontendLink(address, key=key, frontend_id="outside") as link:
        async for event in link:
            assert not isinstance(event, Reset), event.message
            if isinstance(event, Connected):
                return event.contract
    raise AssertionError("the link ended")


def digests_of(images: Sequence[bytes], contract: Contract, key: Key) -> list[Digest]:
    return [digest(image, key=key, modality="image", fingerprint=contract.fingerprint) for image in images]


def features_of(images: Sequence[bytes], model: Path, contract: Contract, key: Key) -> Mapping[Digest, Feature]:
    """The features of images under their digests."""
    processor = HfProcessor.load(model, contract.target)
    made = [processor.process(Media("image", image), {}) for image in images]
    return dict(zip(digests_of(images, contract, key), made, strict=True))
