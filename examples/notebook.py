"""Execute notebook.ipynb on a federation of two sites on this machine, and write its outputs into it.

    python -m tessera.examples.notebook          # or `make notebook`; about two minutes on two cores

The cells are run in this process, one after the other, as Jupyter would run them.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tessera.examples.federation import SEED, TRAIN_DATA, Federation, Holding
from tessera.examples.processes import Processes, end_by_interrupt
from tessera.worker.data.partition.schemes import Dirichlet
from tessera.worker.settings import DataSource

NOTEBOOK = Path(__file__).with_suffix(".ipynb")
EXECUTED = "sources_sha256"
"""Key of the notebook's metadata: the digest of the sources that its outputs come from."""

SITES = ("north-hospital", "south-clinic")


def sources_digest(notebook: dict[str, Any]) -> str:
    """Return the digest of the sources of a notebook's code cells."""
    return hashlib.sha256(json.dumps(["".join(cell["source"]) for cell in _code(notebook)]).encode()).hexdigest()


def _code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(notebook: dict[str, Any]) -> None:
    """Run a notebook's code cells in order, in the current folder, and store their outputs. An error ends it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(_code(notebook), 1):
        cell["outputs"] = list(_outputs("".join(cell["source"]), number, names))
        cell["execution_count"] = number
    notebook["metadata"]["tessera"] = {EXECUTED: sources_digest(notebook)}


def _outputs(source: str, number: int, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a cell, and yield its output and the value of its last line in nbformat's form."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None  # type: ignore[attr-defined]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("default")
        exec(compile(tree, f"cell {number}", "exec"), names)  # noqa: S102 (a notebook executes its cells)
        value = eval(compile(last, f"cell {number}", "eval"), names) if last else None  # noqa: S307
    for name, stream in (("stdout", out), ("stderr", err)):
        if text := stream.getvalue():
            yield {"output_type": "stream", "name": name, "text": text.splitlines(keepends=True)}
    if value is not None:
        html = value._repr_html_() if hasattr(value, "_repr_html_") else None
        data = {"text/plain": repr(value), **({"text/html": html} if html else {})}
        lines = {kind: text.splitlines(keepends=True) for kind, text in data.items()}
        yield {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": lines}


def holdings() -> list[Holding]:
    """Return the two sites' data: each has a part of the digits, of which it holds out a fifth."""
    parts = (
        Dirichlet(scheme="dirichlet", count=len(SITES), index=index, alpha=1.0, seed=SEED)
        for index in range(len(SITES))
    )
    return [
        Holding(site, TRAIN_DATA, DataSource(kind="digits", part=part, held_out=0.2), None)
        for site, part in zip(SITES, parts, strict=True)
    ]


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m tessera.examples.notebook", description=__doc__.partition("\n")[0])
    made.add_argument("--out", type=Path, default=NOTEBOOK, help="the notebook to write; by default itself")
    given = made.parse_args()
    end_by_interrupt()
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    folder = Path(tempfile.mkdtemp(prefix="tessera-notebook-"))
    processes = Processes(folder)
    federation = Federation(folder, processes)
    out = given.out.resolve()
    try:
        federation.start_coordinator()
        with federation.admin() as client:
            for holding in holdings():
                federation.start_worker(client, holding)
            federation.make_model()
            for _ in federation.await_workers(client, len(SITES)):
                pass
        os.environ.update(federation.access)
        with chdir(folder):
            execute(notebook)
    finally:
        processes.stop()
        shutil.rmtree(folder)
    out.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{out}: {len(_code(notebook))} cells executed")


if __name__ == "__main__":
    main()
