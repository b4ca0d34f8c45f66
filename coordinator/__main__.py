"""`python -m coordinator`: the same commands as `tessera coordinator`."""

from shared.lazy import load

load("coordinator.cli").app()
