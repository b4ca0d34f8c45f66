"""The serving process, from its sockets to its shutdown."""

import asyncio
import gc
import socket
from dataclasses import replace
from types import FrameType

import structlog

from tessera.coordinator.alerts.certificate import CertificateFiles
from tessera.coordinator.app import create_app
from tessera.coordinator.conductor.child_process import ChildConductor
from tessera.coordinator.server.connections import Server, ServerConfig
from tessera.coordinator.server.http_limits import configuration, raise_file_limit
from tessera.coordinator.services import Services
from tessera.shared.telemetry import spans

log = structlog.get_logger()

FULL_COLLECTION = 200
"""Collections of younger objects between two full ones."""

RENEWAL_TICKS = 600
"""Uvicorn's ticks of 0.1 s between two looks for a renewed certificate."""


def serve(services: Services, child: ChildConductor | None) -> None:
    """Serve the API until a signal ends it, with the child process that conducts."""
    settings = services.settings
    raise_file_limit(settings.max_connections)
    spans.begin("tessera-coordinator")
    if child:
        services = replace(services, conducts=child.is_alive)
    config = configuration(create_app(services, conduct=False), settings)
    freeze_imports()
    scheme = "https" if settings.tls_cert else "http"
    log.info("coordinator.serving", url=f"{scheme}://{settings.host}:{settings.port}")
    if child:
        child.start()
    _Server(config, services, child).run()


def freeze_imports() -> None:
    """Exempt imports from garbage collection, which would delay one of every few dozen requests by 80 ms.

    Objects of requests and connections are freed without it. So the rest is collected rarely: with 2,000 connections,
    that stops the process for 45 ms.
    """
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION)


class _Server(Server):
    """A server that ends long polls and event streams when it stops, instead of waiting for them."""

    def __init__(self, config: ServerConfig, services: Services, child: ChildConductor | None) -> None:
        super().__init__(config)
        self._services = services
        self._child = child
        self._certificate = CertificateFiles(services.settings)

    async def on_tick(self, counter: int) -> bool:
        if counter % RENEWAL_TICKS == 0 and self.config.tls:
            await asyncio.to_thread(self._certificate.refresh, self.config.tls)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._services.release_waiters()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # Here and not after `run`, which ends the process by the signal that it was sent.
        if self._child:
            await asyncio.to_thread(self._child.stop)
        await asyncio.to_thread(spans.end)
