"""The composition root of the HTTP side."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from coordinator.api import admin, blobs, errors, health, runs, sites, tasks
from coordinator.services import Services
from coordinator.version import VERSION

DESCRIPTION = "Federated learning of transformers: runs, rounds, tasks and the blobs that travel between them."


def create_app(services: Services, *, conduct: bool = True) -> FastAPI:
    """The API over these services; with `conduct`, a thread beside it moves the rounds."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        services.gate.attach()
        thread = threading.Thread(target=services.conductor.conduct, name="conductor")
        if conduct:
            thread.start()
        yield
        services.gate.close()
        services.conductor.end()
        if conduct:
            thread.join()
        services.database.close()

    app = FastAPI(title="Tessera", version=VERSION, description=DESCRIPTION, lifespan=lifespan)
    app.state.services = services
    errors.install(app)
    for module in (runs, tasks, blobs, sites, admin, health):
        app.include_router(module.router)
    return app
