"""`python -m tessera.coordinator`: the same commands as `tessera coordinator`."""

from tessera.shared.lazy_import import load

load("tessera.coordinator.cli").app()
