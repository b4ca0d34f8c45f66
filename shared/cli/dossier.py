"""`tessera run dossier` and `tessera verify`: a version with its signed documents, and the check of the signature."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tessera.shared.cli.connection import RunNamed, client_of
from tessera.shared.client.dossier import fetch_dossier
from tessera.shared.client.dossier import verify as verify_folder
from tessera.shared.client.lookup import find_run
from tessera.shared.client.run_versions import described, find_version, parse_version
from tessera.shared.terminal import output
from tessera.shared.terminal.output import AsJson

app = typer.Typer(add_completion=False)

COMPARE = (
    "the key is the folder's own: compare its fingerprint with that which the coordinator's administrator states, or "
    "give their public key: tessera verify {} --key PUBLIC.pem"
)


def dossier(
    ctx: typer.Context,
    run: RunNamed,
    out: Annotated[Path, typer.Argument(help="The folder to create.")],
    version: Annotated[
        str,
        typer.Option(metavar="VERSION", help="The version's number, `latest`, or `best` by the run's main score."),
    ] = "latest",
    as_json: AsJson = False,
) -> None:
    """Write a version with documents for a board and for auditors, signed by the coordinator, and verify all of it.

    An external base is not part of it: the documents state its digests.
    """
    wanted = parse_version(version)
    client = client_of(ctx)
    found = find_run(client, run)
    chosen, best = find_version(client, found, wanted)
    with output.progress(quiet=as_json) as bar:
        advance = partial(bar.advance, bar.add_task(escape(out.name), total=found.model_bytes))
        verified = fetch_dossier(client, found, chosen, out, advance)
    if as_json:
        output.print_json({"run": found.id, "number": chosen.number, "path": str(out), **asdict(verified)})
        return
    words = f"the best version, {described(best)}," if best else f"version {chosen.number}"
    line = f"{out}: {words} of {found.spec.name}, {verified.files} files signed by {verified.fingerprint}"
    output.out().print(line, soft_wrap=True, markup=False)
    output.note(COMPARE.format(out))


@app.command()
def verify(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder of `tessera run dossier`, an unpacked bundle, or another that was signed so."),
    ],
    key: Annotated[
        Path | None, typer.Option(metavar="PUBLIC.pem", help="The signer's public key, received by another way.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a dossier or a bundle without a coordinator: its signature, every file, and a dossier's weights.

    Exit code 1: something is not as it was signed. Any folder in the OpenSSF Model Signing format is accepted.
    """
    verified = verify_folder(folder, key)
    if as_json:
        output.print_json({"path": str(folder), "key_given": key is not None, **asdict(verified)})
        return
    weights = f"; the weights are version {verified.version}" if verified.version else ""
    line = f"{folder}: {verified.files} files are as {verified.fingerprint} signed them{weights}"
    output.out().print(line, soft_wrap=True, markup=False)
    if key is None:
        output.note(COMPARE.format(folder))
