"""One short cell for its digest: `python -m evidence.short_cell`, the last step of `make evidence-check`.

A row can be made again to the bit by the same code on the same kind of CPU. This runs one round of two local steps of
FedAvg on the sites of F-t, and compares the digest of the model with the digest saved for this kind of CPU.
`--save` saves it, for another kind or after a change of the product that is meant to change bits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from common.files import written_whole
from evidence.jobs import Job
from evidence.plan import Plan, read
from evidence.runs import machine, run
from evidence.sources.prepare import OUT as PREPARED
from evidence.store import SAVED

FILE = SAVED / "short_cell.json"
"""A digest for each kind of CPU."""
TABLE, SEED, RATE = "F-t", 11, 3e-4
OPTIONS = {"unseen_tests": 200, "seen_tests": 100, "site_validation": 1, "site_tests": 1}


def shortened(plan: Plan, name: str) -> tuple[Plan, Job]:
    """Return a plan in which a table has one round of two steps and small tests, and the job of its reference."""
    table = plan.tables[name]
    setting = table.concluding.model_copy(update={"rounds": 1})
    changes = {
        "settings": (setting,),
        "concludes": None,
        "curve_examples": 50,
        "options": {**table.options, **OPTIONS},
        "training": {**table.training, "steps": 2},
    }
    short = plan.model_copy(update={"tables": {name: table.model_copy(update=changes)}})
    return short, Job(name, setting.name, table.reference, SEED, RATE)


def digest_of(plan: Plan, job: Job, prepared: Path) -> str:
    """Run a job and return the digest of its last version. Raises NotPrepared, and the exceptions of `run`."""
    with tempfile.TemporaryDirectory() as out:
        return str(run(plan, job, prepared, Path(out), "cpu")["digest"])


def check(digest: str, kind: str, file: Path, *, save: bool) -> tuple[bool, str]:
    """Return whether a digest equals the saved digest of a kind of CPU, or none is saved, and a sentence about it."""
    saved: dict[str, str] = json.loads(file.read_bytes()) if file.exists() else {}
    if save:
        with written_whole(file) as out:
            out.write(json.dumps({**saved, kind: digest}, indent=1, sort_keys=True).encode() + b"\n")
        return True, f"saved {digest} for {kind}"
    if kind not in saved:
        return True, f"not compared: no digest is saved for {kind}; `python -m evidence.short_cell --save` saves it"
    if saved[kind] != digest:
        return False, (
            f"another digest than the saved one on {kind}: {digest}, not {saved[kind]}. Rows before and after this "
            "change of code cannot be pooled; if it is meant, save the digest with --save and say so in docs/log.md"
        )
    return True, f"the saved digest on {kind}: {digest}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="evidence.short_cell", description=__doc__)
    parser.add_argument("--prepared", type=Path, default=PREPARED, help="the folder of prepared models and data")
    parser.add_argument("--file", type=Path, default=FILE, help="the saved digests")
    parser.add_argument("--save", action="store_true", help="save the digest for this kind of CPU")
    given = parser.parse_args(arguments)
    is_same, sentence = check(
        digest_of(*shortened(read(), TABLE), given.prepared), machine("cpu"), given.file, save=given.save
    )
    print(sentence)
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
