"""Prints the tables of FedFrozen's simulation, and writes each run's figures and a picture into a folder.

python -m linear_attention             three seeds, some minutes on two cores
python -m linear_attention --long      ten seeds
python -m linear_attention --quick     small problems, seconds: to see that it works
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from linear_attention import report
from linear_attention.picture import picture
from linear_attention.study import QUICK, STANDARD, Study, run, write_csv

LONG_SEEDS = 10


def study_of(given: argparse.Namespace) -> Study:
    study = QUICK if given.quick else STANDARD
    seeds = given.seeds or (LONG_SEEDS if given.long else study.seeds)
    return replace(study, seeds=seeds)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m linear_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("bench-output/linear-attention"), help="a folder")
    parser.add_argument("--seeds", type=int, help="how many, in place of 3, of 10 with --long, of 2 with --quick")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--long", action="store_true")
    size.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    study = study_of(given)
    print(
        f"{study.seeds} seeds; mean ± standard deviation over them. Excess: above the least profile objective seen."
    )
    # What diverges is told as diverged.
    with np.errstate(over="ignore", invalid="ignore"):
        for line in (*report.exact(study), *report.descent(study)):
            print(line)
        found = run(study, given.jobs)
    for section in (report.excesses, report.parts, report.controls, report.rule):
        for line in section(found):
            print(line)
    given.out.mkdir(parents=True, exist_ok=True)
    write_csv(found, given.out / "runs.csv")
    picture(found, given.out / "curves.png")
    print(f"\nEach run's figures and a picture: {given.out}")


if __name__ == "__main__":
    main()
