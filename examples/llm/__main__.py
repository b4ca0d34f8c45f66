"""LoRA fine-tuning of a language model by three offices, each with instructions of mostly one kind. The demo
pre-trains a small Llama, or takes the model of `--model FOLDER`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.markup import escape
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging

from tessera.examples.federation import Federation, Holding
from tessera.examples.ledger import Entry
from tessera.examples.llm.instructions import EXERCISES, KINDS, Text, encode, texts, word_tokenizer, write_texts
from tessera.examples.llm.measure import AnswerScores, measure, measure_in_four_bits
from tessera.examples.processes import tessera
from tessera.examples.staging import DemoFailed, parser, play, run_through
from tessera.shared import units
from tessera.shared.terminal import output
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.data.readers.tokenizer import tokenizer_of
from tessera.worker.errors import DataError
from tessera.worker.settings import DataSource

HERE = Path(__file__).parent
SITES = {"alder-office": "capitals", "birch-office": "reverse", "cedar-office": "count"}
"""The kind of most instructions at each site."""
LABORATORY = "reference-lab"
EACH = 450
OWN = 0.75
"""The share of a site's texts that are of its own kind; the others are of the other kinds."""
TESTED = 100
"""New texts of each kind, to measure the model before and after."""
RANK = 8
ROLES = "query,key,value,output,mlp"
PRETRAINING_STEPS = 600
SEED = 0

LLAMA = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def site_texts(kind: str, rng: Random, count: int = EACH) -> list[Text]:
    """Return a site's texts, most of them of this kind."""
    others = [KINDS[name] for name in KINDS if name != kind]
    own = round(count * OWN)
    return texts(KINDS[kind], own, rng) + [texts(rng.choice(others), 1, rng)[0] for _ in range(count - own)]


def new_texts(known: set[Text], rng: Random) -> dict[str, list[Text]]:
    """Return texts of each kind that are none of those known."""
    return {
        name: [text for text in texts(kind, 2 * TESTED, rng) if text not in known][:TESTED]
        for name, kind in KINDS.items()
    }


def holdings(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Holding], dict[str, list[Text]]]:
    """Write each site's file. Return the sites' data, and new texts of each kind."""
    rng = Random(SEED)
    by_site = {site: site_texts(kind, rng) for site, kind in SITES.items()}
    tested = new_texts({text for some in by_site.values() for text in some}, rng)
    found = []
    for site, some in by_site.items():
        write_texts(folder / f"{site}.safetensors", tokenizer, some)
        found.append(Holding(site, "instructions", _source(folder, site), "train"))
    write_texts(folder / f"{LABORATORY}.safetensors", tokenizer, [text for some in tested.values() for text in some])
    test = _source(folder, LABORATORY, "evaluate")
    return [*found, Holding(LABORATORY, "instructions-test", test, "evaluate")], tested


def _source(folder: Path, site: str, use: str = "train") -> DataSource:
    given = {"use": use, "kind": "arrays", "file": str(folder / f"{site}.safetensors")}
    return DataSource.model_validate(given)


def pretrained(out: Path, steps: int) -> None:
    """Train a small Llama on other instructions about the same words, and save it with its tokenizer."""
    torch.manual_seed(SEED)
    tokenizer, rng = word_tokenizer(), Random(SEED + 1)
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model = LlamaForCausalLM(LlamaConfig.from_dict({**LLAMA, **special, "vocab_size": len(tokenizer)}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    kinds = list(EXERCISES.values())
    for _ in range(steps):
        batch = encode(tokenizer, [texts(rng.choice(kinds), 1, rng)[0] for _ in range(32)])
        optimizer.zero_grad()
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def tokenizer_beside(base: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model's folder. Raises DemoFailed."""
    if not (base / "config.json").is_file():
        raise DemoFailed(f"{base} has no config.json: name a folder that `save_pretrained` has written")
    try:
        tokenizer = tokenizer_of("--model", str(base))
    except DataError as fault:
        raise DemoFailed(f"{fault}. Save the model's tokenizer into this folder with `save_pretrained`") from fault
    if tokenizer.eos_token_id is None:
        raise DemoFailed(f"{base}: the tokenizer has no end-of-text token: set its eos_token and save it again")
    return tokenizer


def merged(federation: Federation) -> Path:
    """Add the adapters of the exported model to its matrices, and return the new folder."""
    out = federation.folder / "merged-model"
    exported = str(federation.folder / "global-model")
    federation.processes.start("model-merge", tessera("model", "merge", exported, str(out)), {})
    federation.processes.finish("model-merge")
    return out


def demo(console: Console, federation: Federation, given: argparse.Namespace) -> None:
    console.print(
        f"[bold]Tessera[/]: {len(SITES)} offices teach one language model their instructions with LoRA. Each has "
        f"{EACH} texts, {OWN:.0%} of one kind: {', '.join(SITES.values())}. No text leaves its office.\n",
        soft_wrap=True,
    )
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    data = federation.folder / "data"
    data.mkdir()
    base = given.model.resolve() if given.model else data / "llama"
    is_external = given.base == "external"
    if given.base_bits:
        federation.compute["base_bits"] = given.base_bits
    if not given.model:
        with console.status("pre-training a small Llama on other instructions"):
            torch.set_num_threads(1)
            pretrained(base, given.pretraining_steps)
    tokenizer = tokenizer_beside(base)
    held, tested = holdings(data, tokenizer)
    inputs = {kind: encode(tokenizer, some) for kind, some in tested.items()}
    before = measure(base, inputs)

    def model() -> ModelFolder:
        adapters = ("--lora-rank", str(RANK), "--lora-roles", ROLES)
        external = ("--external-base",) if is_external else ()
        made = federation.make_model(
            "--config", str(base), "--pretrained", "--head", "causal-lm", *adapters, *external
        )
        if is_external:
            federation.add_base([holding.site for holding in held], base)
        return made

    folder = base if is_external else None
    entries = run_through(console, federation, held, model, HERE / "run.toml", given.settings, folder)
    _print_bytes(console, entries, is_external=is_external)
    out = merged(federation)
    found = {"before": before, "after": measure(out, inputs)}
    if given.base_bits:
        found["4-bit base"] = measure_in_four_bits(federation.folder / "global-model", inputs)
    _print_scores(console, found)
    if given.base_bits:
        console.print(
            "\nThe offices trained adapters beside a base in 4 bits (4-bit base). Merging adds them to the base as "
            "it was (after): the difference comes from rounding to 4 bits.",
            soft_wrap=True,
        )
    console.print(
        "\nMeasured with transformers alone on texts that no office has. This loads the model with merged adapters:\n"
        f"  AutoModelForCausalLM.from_pretrained({escape(repr(str(given.out / out.name)))})\n"
        f"Models and logs: {escape(str(given.out))}",
        soft_wrap=True,
    )


def _print_bytes(console: Console, entries: Sequence[Entry], *, is_external: bool) -> None:
    first, last = entries[0], entries[-1]
    whole, down, up = (
        units.size(nbytes // entry.accepted)
        for entry, nbytes in ((first, first.download_bytes), (last, last.download_bytes), (last, last.upload_bytes))
    )
    began = (
        f"The base never passed the coordinator: each office has it, and received {whole} in round 1."
        if is_external
        else f"The whole model went to each office once, in round 1, in {whole}."
    )
    console.print(
        f"{began} Only adapters follow: in round {last.number} each office received {down} and sent {up}; the whole "
        f"model is {units.size(last.model_bytes)}.\n",
        soft_wrap=True,
    )


def _print_scores(console: Console, found: Mapping[str, Mapping[str, AnswerScores]]) -> None:
    """Print the scores of each measurement, by its name."""
    columns = ("instruction", "office", *(f"{figure} {name}" for figure in ("right", "loss") for name in found))
    rows = []
    for site, kind in SITES.items():
        scores = [each[kind] for each in found.values()]
        rows.append((kind, site, *(f"{each.right:.0%}" for each in scores), *(f"{each.loss:.2f}" for each in scores)))
    console.print(output.table(columns, rows, right=columns[2:]))


def arguments() -> argparse.Namespace:
    made = parser("tessera.examples.llm", __doc__)
    made.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="fine-tune this causal language model, saved with its tokenizer by save_pretrained; it needs a smaller "
        "learning rate, such as --set training.learning_rate=0.0002",
    )
    made.add_argument(
        "--pretraining-steps", type=int, default=PRETRAINING_STEPS, help="for the small model; default %(default)s"
    )
    made.add_argument(
        "--base",
        choices=("external", "sent"),
        help="external: each office adds the model's folder to its worker, and the coordinator has digests alone; "
        "sent: the coordinator has the whole model. Default: external with --model, else sent",
    )
    made.add_argument("--base-bits", type=int, choices=(4,), help="keep the base in 4 bits at the offices")
    given = made.parse_args()
    if given.model and given.model.resolve().is_relative_to(given.out.resolve()):
        made.error(
            f"--model {given.model} is in {given.out}, which this demo replaces: move it, or give another --out"
        )
    given.base = given.base or ("external" if given.model else "sent")
    return given


if __name__ == "__main__":
    sys.exit(play(demo, arguments()))
