"""A study's figures: rows that are printed, and written as JSON at once."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

OUT = Path("bench-output")

Cell = str | int | float | None


@dataclass
class Results:
    """The rows of a study."""

    name: str
    about: str
    rows: list[dict[str, Cell]] = field(default_factory=list)

    def add(self, **cells: Cell) -> None:
        self.rows.append(cells)

    def show(self) -> None:
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        shown = Table(*columns, title=f"{self.name}: {self.about}", title_justify="left")
        for row in self.rows:
            shown.add_row(*(_shown(row.get(name)) for name in columns))
        Console(width=200).print(shown)

    def write(self, folder: Path = OUT) -> Path:
        """Write the rows into a folder. Return the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        written = {"name": self.name, "about": self.about, "rows": self.rows}
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        return path


def _shown(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "-"
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)
