"""Check all that must hold before a release, on a clean checkout of the present commit: `make release-check`.

It takes hours, and needs root for the images. A step that passed is not repeated: what was stopped, or whose
machine lacked a program, is resumed by the same command. docs/releasing.md.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import time
from pathlib import Path

from release.packages import ROOT

STEPS = {
    "version": ".venv/bin/python -m release.check --version-only",
    "style": "make check",
    "tests": "make test",
    "demo": "make demo",
    "locks": "make lock && git diff --exit-code constraints.txt deploy",
    # Fails for a licence that is not permitted.
    "sbom": "make sbom",
    "chart": "make deploy-check",
    "postgresql": "make test-postgresql",
    # Among them: wheels equal bit for bit, their quickstart, proxies, Slurm, two versions at once, and the evidence.
    "long": "make test-long",
    "images": "make image-check image-archives",
    "bundle": "ls dist/tessera-coordinator.oci.tar dist/tessera-worker.oci.tar && make bundle KEY=../key.pem"
    " && .venv/bin/tessera verify dist/tessera-*-cp*/ --key ../key.pem.pub"
    " && python3 -I dist/tessera-*-cp*/verify.py ../key.pem.pub",
}
SKIPPED = re.compile(r"^SKIPPED \[\d+\].*", re.MULTILINE)


def version() -> None:
    """Raise SystemExit unless one version is everywhere, and the changelog states the day of its release."""
    named = {
        "pyproject.toml": r'^version = "(.+)"',
        "Dockerfile": r"^ARG VERSION=(.+)",
        "deploy/helm/tessera/Chart.yaml": r"^version: (.+)",
        "deploy/worker-gpu.kubernetes.yaml": r"image: tessera-worker:(.+)",
        "CHANGELOG.md": r"^## (\S+)",
    }
    found = {file: re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)[0] for file, pattern in named.items()}
    if len({*found.values()}) > 1:
        raise SystemExit(f"the version differs: {found}")
    (number,) = {*found.values()}
    head, tagged = (_git("rev-parse", "--verify", name) for name in ("HEAD", f"v{number}^{{commit}}"))
    if tagged not in ("", head):
        raise SystemExit(f"v{number} is the tag of {tagged[:12]}: write a new version")
    heading = rf"^## {re.escape(number)} \(\d{{4}}-\d\d-\d\d\)\n\n- "
    if not re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise SystemExit(
            f"CHANGELOG.md does not state the day of the newest version, as in: ## {number} (2026-12-24)"
        )


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def passes(name: str, place: Path) -> bool:
    """Do a step, unless it has passed; print how it ended and which tests it skipped."""
    log, stamp = place / f"{name}.log", place / f"{name}.passed"
    if not stamp.exists():
        began = time.monotonic()
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
        with log.open("w") as out:
            command = ["bash", "-c", STEPS[name]]
            done = subprocess.run(
                command, cwd=place / "checkout", env=environment, stdout=out, stderr=out, check=False
            )
        if done.returncode:
            last = next(
                (line for line in reversed(log.read_text().splitlines()) if line.strip()), "it printed nothing"
            )
            print(f"{name}: FAILED, {last}\n  {log}", flush=True)
            return False
        stamp.write_text(f"{time.monotonic() - began:.0f} s")
    print(f"{name}: passed in {stamp.read_text()}", flush=True)
    for line in SKIPPED.findall(log.read_text()):
        print(f"  {line}", flush=True)
    return True


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m release.check", description="Check a commit before its release.")
    made.add_argument("--only", action="append", choices=STEPS, help="a step; may be repeated")
    made.add_argument("--version-only", action="store_true", help="compare versions, and nothing else")
    given = made.parse_args()
    if given.version_only:
        version()
        return
    if changed := _git("status", "--porcelain"):
        raise SystemExit(f"commit these first, or remove them:\n{changed}")
    commit = _git("rev-parse", "HEAD")
    place = ROOT / "dist" / f"release-check-{commit[:12]}"
    if not (place / "checkout").exists():
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, place / "checkout"], check=True)
    subprocess.run(["make", "install"], cwd=place / "checkout", check=True)
    failed = [name for name in given.only or STEPS if not passes(name, place)]
    if failed:
        raise SystemExit(f"not ready: {', '.join(failed)} failed. Mend it, and run this again.")
    left = [name for name in STEPS if not (place / f"{name}.passed").exists()]
    print(f"still to be checked: {', '.join(left)}" if left else f"{commit} is ready to be released")


if __name__ == "__main__":
    main()
