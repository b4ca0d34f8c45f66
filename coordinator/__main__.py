"""`python -m coordinator`: the same commands as `tessera coordinator`."""

from coordinator.cli import app

app()
