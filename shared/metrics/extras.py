"""Import of the modules that an extra installs."""

import importlib
from types import ModuleType

from tessera.shared.problems import Invalid
from tessera.shared.version import install_line

# Modules that need an extra, imported only on demand, and the name of that extra.
EXTRAS = {"data_frames": "tables", "parquet_file": "tables", "svg_charts": "tables", "mlflow_store": "mlflow"}


def extra(name: str) -> ModuleType:
    """Import one of the modules in EXTRAS. Raises Invalid that names the missing package."""
    try:
        return importlib.import_module(f"tessera.shared.metrics.{name}")
    except ModuleNotFoundError as fault:
        raise Invalid(
            f"this needs {fault.name}, which is not installed",
            remedy=f"Run: {install_line(EXTRAS[name])}",
        ) from fault
