"""Another system's side of `benchmarks.rounds --beside`: `python -m rivals flower`, or `flare`."""

from __future__ import annotations

import json
import sys

from rivals.flare import Flare
from rivals.flower import Flower
from rivals.timed import Given

SIDES = {"flower": Flower, "flare": Flare}


def main(name: str) -> None:
    # What libraries print must not be read as an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    with SIDES[name](Given.read(sys.stdin.readline())) as side:
        print("ready", file=answers, flush=True)
        for rounds in sys.stdin:
            print(json.dumps(side.turn(int(rounds))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
