"""Repeat runs of the tables between real processes over HTTP: `python -m evidence.over_http`.

A coordinator and a worker for each site run as an administrator starts them, and train as a simulation that has the
workers' audit keys: the last version must have the same digest. The tables' runs are simulated without keys, on which
training seeds depend, so that their digests are others. The first seed of an arm of each paper is repeated: workers
read phrases as tensors, and emoji as PNG files with captions. `--save` writes the results into the repository, and
`python -m evidence --save` writes them into the document.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from PIL import Image
from safetensors.torch import save_file

from common.federation import Federation, Options
from common.names import LABELS, PIXELS
from evidence import store
from evidence.__main__ import OUT, REFUSED
from evidence.federations import source, start
from evidence.jobs import Job, choice
from evidence.plan import Plan, read
from evidence.pool import METHODS, Figures, begin
from evidence.report.lines import repeated_line
from evidence.runs import described, inputs_of, machine, spec_of
from evidence.sources.dinov2 import MEAN, STD
from evidence.sources.emoji import Emoji
from evidence.sources.lit import LIT, class_caption
from evidence.sources.prepare import EMOJI
from evidence.sources.prepare import OUT as PREPARED
from tessera.simulation import Conditions, Stalled, VirtualSite, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.normalization import PixelNormalization

ARMS = (("S-a", "attention"), ("F-t", "fedfrozen"), ("P-a", "pfeddc"))
"""The tables and arms that are repeated, in the setting that claims are about."""
DATASET = "examples"
WORKER = "worker"
"""The name of each worker in a simulation, on which its random numbers depend."""
TOKENIZER = "tokenizer.json"


class NotComparable(ValueError):
    """A run that cannot be repeated over HTTP, or has no digest to be compared with."""


def jobs(plan: Plan, found: store.Found, arms: Sequence[tuple[str, str]] = ARMS) -> list[Job]:
    """Return the runs to repeat: the first seed of each arm. Raises NotComparable if one has no learning rate yet."""
    scores, wanted = {job: figures["score"] for job, figures in found.items()}, []
    for table, arm in arms:
        cell = table, plan.tables[table].concluding.name, arm
        rate = choice(plan, scores, cell)
        if rate is None:
            raise NotComparable(
                f"the learning rate of {table}/{arm} is not chosen: run `python -m evidence --scope core "
                f"--tables {table} --arms {arm}` first"
            )
        wanted.append(Job(*cell, plan.protocol.headline_seeds[0], rate))
    return wanted


def repeat(plan: Plan, job: Job, prepared: Path, folder: Path) -> Figures:
    """Run a job in a simulation and over HTTP, in a new folder. Return both last versions' digests and what moved.

    Sites measure nothing, which changes no version. Raises NotComparable for an arm whose sites do not all train or
    whose simulation stalls, and the exceptions of `Federation`.
    """
    table = plan.tables[job.table]
    arm, setting, kind = table.arm(job.arm), table.setting(job.setting), source(table.federation)
    if arm.central or setting.dropout or setting.away:
        raise NotComparable(f"{job.name} is central or has absent sites: choose another arm or setting")
    options = {**table.options, **setting.federation}
    sites = kind.federation(prepared, job.seed, options).sites
    model = start(kind, prepared, job.seed, arm.model, options, folder / "models")
    # A coordinator limits the weights of sites by default, and a simulation does not.
    spec = {**spec_of(plan, job, len(sites)), "dataset": DATASET, "max_examples": "unlimited"}
    spec.pop("evaluation", None)
    keys = {site: hashlib.sha256(site.encode()).digest() for site in sites}
    keyed = {site: VirtualSite(data, audit_key=keys[site]) for site, data in sites.items()}
    try:
        simulated = simulate(spec, model, keyed, conditions=Conditions(threads=1, loaded=len(sites)))
    except Stalled as fault:
        raise NotComparable(f"{job.name} has no last version, choose another arm: {fault}") from fault
    began = monotonic()
    with Federation(folder / "federation", METHODS) as federation:
        for site, data in sites.items():
            files = folder / f"{site}-files"
            files.mkdir()
            examples = captioned(data, prepared, files) if data.common else tensors(data, files)
            federation.start_worker(site, DATASET, examples, WORKER, keys[site])
        last = federation.run(spec, model).version
        moved = federation.moved()
    return {
        **described(plan, job),
        "inputs": inputs_of(kind, prepared),
        "simulated": simulated.versions[-1].digest,
        "digest": last.digest,
        "received_bytes": moved["received"],
        "sent_bytes": moved["sent"],
        "seconds": round(monotonic() - began, 1),
        "machine": machine("cpu"),
    }


def tensors(data: Dataset, folder: Path) -> Options:
    """Write a site's examples as the inputs of a model. Return the options of the data set that reads them."""
    file = folder / "examples.safetensors"
    save_file(data.tensors, file)
    return {"kind": "arrays", "file": str(file)}


def captioned(data: Dataset, prepared: Path, folder: Path) -> Options:
    """Write a site's emoji as PNG files, a table of them and the tokenizer of their captions. Return the options of
    the data set that reads them."""
    shutil.copy(prepared / LIT.name / TOKENIZER, folder)
    named = {"pad_token": "[PAD]", "model_input_names": list(data.common)}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    captions = [class_caption(name) for name in Emoji.load(prepared / EMOJI).classes]
    pixels = PixelNormalization(MEAN, STD).inverse(data.tensors[PIXELS]).numpy()
    table = folder / "examples.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "label"])
        for place, label in enumerate(data.tensors[LABELS].tolist()):
            Image.fromarray(pixels[place]).save(folder / f"{place}.png")
            rows.writerow([f"{place}.png", captions[label]])
    return {
        "kind": "imagetext",
        "file": str(table),
        "labels": captions,
        "absent": "any",
        "template": "{}",
        "tokenizer": str(folder),
        "size": pixels.shape[1],
        "mean": MEAN,
        "std": STD,
        # Convolutions round by how pixels lie in memory: read for each batch, they lie as in the simulation.
        "in_memory": False,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m evidence.over_http",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ["/".join(each) for each in ARMS]
    parser.add_argument("--prepared", type=Path, default=PREPARED, help="the folder of prepared models and data")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of results")
    parser.add_argument("--arms", nargs="+", choices=names, default=names, help="only these tables and arms")
    parser.add_argument("--save", action="store_true", help="write the results into the repository, beside others")
    given = parser.parse_args(arguments)
    plan = read()
    saved, digests = {store.job_of(each): each for each in store.repeated(plan)}, list[bool]()
    begin()
    try:
        found = store.finished(given.out, plan)
        for job in jobs(plan, found, [each for each in ARMS if "/".join(each) in given.arms]):
            with tempfile.TemporaryDirectory() as name:
                saved[job] = repeat(plan, job, given.prepared, Path(name))
            digests.append(saved[job]["digest"] == saved[job]["simulated"])
            print(repeated_line(saved[job]), flush=True)
            if given.save:
                store.save_repeated(list(saved.values()))
    except NotComparable as fault:
        print(fault, file=sys.stderr)
        return REFUSED
    return 0 if all(digests) else 1


if __name__ == "__main__":
    sys.exit(main())
