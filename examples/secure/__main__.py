"""The demo of secure sums: six sites train, and the coordinator learns sums of their updates alone, with noise of the
sites. One site and one helper are killed on the way."""

from __future__ import annotations

import sys
import uuid
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from tessera.examples.federation import LABORATORY, SITES, TEST_DATA, TRAIN_DATA, Federation, Holding
from tessera.examples.staging import DemoFailed, parser, play
from tessera.shared.api.runs import Run, RunSpec
from tessera.shared.client.client import Client
from tessera.shared.client.model_upload import upload_model
from tessera.shared.client.round_outcomes import RoundOutcome, follow
from tessera.shared.client.run_file import read_spec
from tessera.shared.privacy.noise_shares import epsilon_of, rho_for
from tessera.shared.secure_sums.messages import fingerprint
from tessera.shared.terminal.watch import print_ended
from tessera.worker.data.partition.schemes import Dirichlet
from tessera.worker.settings import DataSource
from tessera.worker.state.site_keys import KEYS_FOLDER, Keyring

HERE = Path(__file__).parent
ALL = (*SITES, "elm-practice", "fern-hospice")
LOST = "fern-hospice"
"""Killed for good after the second round."""
BACK = "birch-hospital"
"""A helper, killed after the fourth round, which comes back."""

SCALE = 100
"""How many times as many sites the epsilon is also printed for."""

# The coordinator soon notices who is gone, and does not wait for them long.
ATTENTIVE = {"TESSERA_LIVENESS_SECONDS": "20", "TESSERA_COHORT_WAIT_SECONDS": "3"}


def holdings() -> tuple[Holding, ...]:
    """Return the data of six sites that train, and of a laboratory that measures."""
    parts = (Dirichlet(scheme="dirichlet", count=len(ALL), index=n, alpha=1.0, seed=0) for n in range(len(ALL)))
    training = (DataSource(kind="digits", part=part) for part in parts)
    return (
        *(Holding(site, TRAIN_DATA, source, "train") for site, source in zip(ALL, training, strict=True)),
        Holding(LABORATORY, TEST_DATA, DataSource(kind="digits", split="test", use="evaluate"), "evaluate"),
    )


def compare_fingerprints(federation: Federation, helpers: Sequence[str]) -> None:
    """Write into each site's settings the fingerprints of the others: what people do by telephone."""
    known = {}
    for site in ALL:
        state = federation.home(site) / "state"
        state.mkdir(parents=True)
        known[site] = fingerprint(Keyring(state / KEYS_FOLDER).identity().public)
    roster = "".join(f'{site} = "{digits}"\n' for site, digits in known.items())
    for site in ALL:
        helper = str(site in helpers).lower()
        federation.tables[site] = (
            f'[secure_sums]\nsite = "{site}"\nhelper = {helper}\n\n[secure_sums.roster]\n{roster}\n'
            "[policy]\nrequire_secure_sums = true\n"
            "require_client_privacy = { epsilon = 1000, delta = 1e-5 }\n"
        )


def _demo(console: Console, federation: Federation, given: Namespace) -> None:
    wanted = read_spec(HERE / "run.toml", given.settings)
    helpers = wanted["secure_sums"]["helpers"]
    console.print(
        "[bold]Tessera[/]: six institutions train a model. The coordinator can read no update, and no sum without "
        "noise.\n"
    )
    federation.start_coordinator(ATTENTIVE)
    compare_fingerprints(federation, helpers)
    with federation.admin() as client:
        for holding in holdings():
            federation.start_worker(client, holding)
        folder = federation.make_model()
        for _ in federation.await_workers(client, len(ALL) + 1):
            pass
        uploaded = upload_model(client, folder)
        spec = RunSpec.model_validate({**wanted, "model": uploaded.model, "version": uploaded.version})
        run = client.create_run(spec, key=uuid.uuid4().hex)
        console.print(f"Helpers: {', '.join(helpers)}. Three must sign who sent, two open the sum.\n", soft_wrap=True)
        outcomes = _follow(console, federation, client, run)
        _say_who_saw_what(console, outcomes)
        _say_epsilon(console, client.run(run.id))
    console.print(f"Logs: {escape(str(given.out))}")


def _follow(console: Console, federation: Federation, client: Client, run: Run) -> list[RoundOutcome]:
    """Print each round as it ends, kill two workers on the way, and return the committed rounds."""
    done: list[RoundOutcome] = []
    for glimpse in follow(client, run.id, poll_seconds=0.25):
        federation.processes.check()
        for outcome in glimpse.ended:
            print_ended(console, outcome)
            if outcome.round.state != "committed":
                continue
            done.append(outcome)
            if outcome.round.number == 2:
                federation.processes.kill(LOST)
                console.print(f"  {LOST} is killed, for good")
            elif outcome.round.number == 4:
                federation.processes.kill(BACK)
                console.print(f"  {BACK}, a helper, is killed; it comes back when the next round waits for it")
                federation.restart_worker(BACK)
    if glimpse.run.state != "completed":
        raise DemoFailed(f"the run is {glimpse.run.state}: {glimpse.run.reason}")
    return done


def _say_who_saw_what(console: Console, outcomes: Sequence[RoundOutcome]) -> None:
    merged = [task for outcome in outcomes for task in outcome.round.tasks if task.state == "merged"]
    if any(task.metrics for task in merged):
        raise DemoFailed("a site reported figures of its own")
    sizes = {len([task for task in outcome.round.tasks if task.state == "merged"]) for outcome in outcomes}
    console.print(
        f"\nThe coordinator has {len(merged)} masked updates and {len(outcomes)} noisy sums, each over {min(sizes)} "
        f"to {max(sizes)} sites. The helpers have signed {len(outcomes)} sets of senders and returned sums of masks; "
        "no update was sent to them. The recipients of the model have the versions. Each site alone has its update.",
        soft_wrap=True,
    )
    console.print("`tessera audit export` prints which helper signed and opened what.", soft_wrap=True)


def _say_epsilon(console: Console, run: Run) -> None:
    target = run.spec.client_privacy
    if target is None:
        return
    rho = rho_for(target) * run.version.number / run.spec.rounds
    larger = epsilon_of(rho / SCALE**2, target.delta)
    console.print(
        f"\nEach site as a whole: epsilon {run.client_epsilon:.4g} at delta {target.delta:g}, by noise of the sites. "
        f"That of {run.spec.honest_sites} senders of each sum suffices. So large an epsilon protects hardly "
        "anything: six sites are too few to hide one of them and to learn. In a mean of "
        f"{SCALE * len(ALL)} sites the same noise would be epsilon {larger:.2g}.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(play(_demo, parser("tessera.examples.secure", __doc__).parse_args()))
