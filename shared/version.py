"""The version that is running."""

from importlib.metadata import version

VERSION = version("tessera")
