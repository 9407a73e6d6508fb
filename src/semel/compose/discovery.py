"""Where a frontend's workers are, of its flags; and how it keeps to that."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from semel.settings import DiscoverySettings, kubernetes_api

if TYPE_CHECKING:
    from semel.fleet.discovery import AddressSource, WorkerDirectory
    from semel.fleet.membership import Membership

__all__ = ["address_sources", "keep_linked"]


def address_sources(settings: DiscoverySettings) -> tuple[AddressSource, ...]:
    """What the flags name besides single workers: a file, names in DNS, services of Kubernetes."""
    from semel.fleet.discovery import sources_of
    from semel.fleet.endpoint_slices import ServicePort
    from semel.fleet.slice_watch import SliceSource

    services = tuple(map(ServicePort.parse, settings.workers_slices))
    api = kubernetes_api() if services else None
    slices = (SliceSource(service, api) for service in services if api is not None)
    return (*sources_of(settings.workers_file, settings.workers_dns, settings.workers_dns_s), *slices)


async def keep_linked(members: Membership, directory: WorkerDirectory) -> None:
    """Follow the lists of workers while the sources keep them up to date."""
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(directory.watch())
        await members.run(directory.lists())
        watching.cancel()
