"""`tessera --version --verbose`: what a report of a fault should name."""

import platform
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import tessera
from tessera.shared.schema import PROTOCOL
from tessera.shared.version import NAME, VERSION

OF_DEVELOPMENT = ("demo", "deploy", "dev", "release", "simulation")
"""Extras that only collect others, or that only a checkout uses."""

_REQUIREMENT = re.compile(r"""([\w.-]+)[^;]*(?:;.*extra == ["']([\w-]+)["'])?""")
_MIGRATIONS = Path(tessera.__file__).with_name("migrations") / "versions"


def schema() -> str:
    """Return the newest revision of the database schema."""
    return max(file.stem for file in _MIGRATIONS.glob("[0-9]*.py")).partition("_")[0]


def lines() -> Iterator[str]:
    """Yield the versions of Tessera, Python, the platform, the worker protocol, the database schema and all direct
    dependencies, by extra."""
    yield f"tessera {VERSION}"
    yield f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}"
    yield f"worker protocol {PROTOCOL}, database schema {schema()}"
    for extra, packages in _packages().items():
        found = {package: _installed(package) for package in packages}
        lacking = [package for package, number in found.items() if number is None]
        state = f" (not installed: lacks {', '.join(lacking)})" if lacking else ""
        yield f"\n{extra or 'always'}{state}"
        yield from (f"  {package} {number}" for package, number in found.items() if number)


def _packages() -> dict[str, list[str]]:
    """Return the packages that are always needed, under "", and those of each extra."""
    found = defaultdict[str, list[str]](list)
    for requirement in requires(NAME) or ():
        if (match := _REQUIREMENT.match(requirement)) and match[2] not in OF_DEVELOPMENT:
            found[match[2] or ""].append(match[1])
    return found


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
