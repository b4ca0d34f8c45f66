"""Whether the tests find each mutant: `python -m tests.mutants [WORD...]`, those with such a word in file or line."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant
from tests.support.paths import ROOT

SECONDS = itertools.count(1_000_000_000)
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__")


def caught(mutant: Mutant, tree: Path) -> bool:
    """Whether one of its tests fails in this copy of the tree, which is left as it was."""
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
    # One of the same size and second would be taken for what was compiled before.
    second = next(SECONDS)
    os.utime(file, (second, second))


def main(words: list[str]) -> int:
    chosen = [one for one in MUTANTS if not words or any(word in f"{one.file} {one.old}" for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="tessera-mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
        for mutant in chosen:
            found = caught(mutant, tree)
            missed += not found
            print(f"{'caught' if found else 'NOT CAUGHT'}: {mutant.file}: {mutant.new}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutants are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
