"""Plant each fault and look whether it is found: `python -m tests.mutants [WORD...]`, by words of their names."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant
from tests.mutants.planted import FAULTS, hunt, hunt_in_rules
from tests.support.paths import ROOT

SECONDS = itertools.count(1_000_000_000)
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__")


def caught(mutant: Mutant, tree: Path) -> bool:
    """Return whether one of a mutant's tests fails in this copy of the tree, which is left as it was."""
    file = tree / mutant.file
    text = file.read_text()
    _write(file, text.replace(mutant.old, mutant.new))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests],
            cwd=tree,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", "TESSERA_TEST_DATABASE": "sqlite"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        _write(file, text)
    # 1: tests failed. Any other code means that they did not run.
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 1


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    # Python would use the old bytecode of a file with the same size and second.
    second = next(SECONDS)
    os.utime(file, (second, second))


def findings(words: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield each fault whose name has one of these words, and whether it was found."""
    with tempfile.TemporaryDirectory(prefix="tessera-mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
        for mutant in MUTANTS:
            name = f"{mutant.file}: {mutant.old} -> {mutant.new}"
            if not words or any(word in name for word in words):
                yield name, caught(mutant, tree)
    for name, fault in FAULTS.items():
        if not words or any(word in name for word in words):
            hunts = ([hunt] if fault.changes or fault.without else []) + ([hunt_in_rules] if fault.in_rules else [])
            yield name, fault.hidden or all(look(name) for look in hunts)


def main(words: list[str]) -> int:
    found = []
    for name, is_found in findings(words):
        found.append(is_found)
        print(f"{'found' if is_found else 'NOT FOUND'}: {name}", flush=True)
    hidden = sorted(name for name, fault in FAULTS.items() if fault.hidden)
    print(f"{sum(found)} of {len(found)} faults are found, or known to be hidden: {hidden}")
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
