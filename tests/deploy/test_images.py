"""What the Dockerfile says. test_containers.py builds its images and starts them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from release import locks
from tessera.coordinator.settings import CoordinatorSettings
from tests.support.coordinator import LiveCoordinator
from tests.support.paths import ROOT
from tests.support.processes import free_port

TARGETS = ("coordinator", "worker")
USER = 10001


@dataclass
class Stage:
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def said(self, instruction: str) -> list[str]:
        return [argument for name, argument in self.steps if name == instruction]


def stages() -> dict[str, Stage]:
    """The Dockerfile's stages by name, each with its instructions."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, text.splitlines()):
        instruction, _, argument = line.partition(" ")
        if instruction == "ARG" and not found:
            default = argument.partition("=")[2]
        elif instruction == "FROM":
            base, _, name = argument.partition(" AS ")
            found[name] = Stage(base.replace("$BASE", default))
        else:
            found[name].steps.append((instruction, argument))
    return found


def whole(target: str) -> Stage:
    """An image's instructions, with those of the stages that it is from."""
    found = stages()
    lineage = [found[target]]
    while lineage[0].base in found:
        lineage.insert(0, found[lineage[0].base])
    return Stage(lineage[0].base, [step for stage in lineage for step in stage.steps])


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_nobody_by_number_and_is_watched(target: str) -> None:
    image = whole(target)
    assert image.base == "python:3.11-slim-bookworm"
    assert image.said("USER") == [f"{USER}:{USER}"]
    assert len(image.said("HEALTHCHECK")) == len(image.said("ENTRYPOINT")) == len(image.said("CMD")) == 1
    labels = " ".join(image.said("LABEL"))
    for label in ("title", "description", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_what_was_built_and_nothing_to_build_with(target: str) -> None:
    image = whole(target)
    assert image.said("COPY") == [f"--from=build-{target} /opt/tessera /opt/tessera"]
    assert "pip uninstall" in " ".join(image.said("RUN"))
    assert not re.search(r"apt|gcc|pip install", " ".join(image.said("RUN")))


def test_what_is_copied_is_let_through_and_nothing_else_is() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [line for stage in ("wheel", "build") for line in stages()[stage].said("COPY")]
    assert kept == {source for line in copied for source in line.split()[:-1]}


def health_check(target: str) -> str:
    """The command of an image's HEALTHCHECK, as JSON."""
    return re.sub(r"^.*?CMD ", "", whole(target).said("HEALTHCHECK")[0])


def test_a_proxy_in_the_environment_does_not_hide_the_coordinator_s_health(coordinator: LiveCoordinator) -> None:
    _, *arguments = json.loads(
        health_check("coordinator").replace("127.0.0.1:8470", urlsplit(coordinator.url).netloc)
    )
    # No proxy listens there.
    proxied = {**os.environ, "http_proxy": f"http://127.0.0.1:{free_port()}", "no_proxy": ""}
    subprocess.run([sys.executable, *arguments], env=proxied, check=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ("", " --requirement deploy/requirements-cuda.lock")),
        ("https://wheels.example/cpu", (" --index-url https://wheels.example/cpu", "")),
    ],
    ids=["cuda", "cpu"],
)
def test_the_worker_s_torch_has_cuda_only_where_it_is_wanted(
    tmp_path: Path, given: str, expected: tuple[str, str]
) -> None:
    stage = stages()["build-worker"]
    # An interpreter that does nothing but show what it is called with.
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    there = {"PATH": f"{tmp_path}:/usr/bin:/bin", stage.said("ARG")[0].partition("=")[0]: given}
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy/requirements-worker.lock", tmp_path / "deploy")
    command = ["sh", "-ec", stage.said("RUN")[0]]
    said = subprocess.run(command, cwd=tmp_path, env=there, capture_output=True, text=True, check=True).stdout
    torch_alone, rest = said.splitlines()
    assert torch_alone.endswith(f" --require-hashes --no-deps{expected[0]} --requirement torch.lock")
    assert rest.endswith(f" --require-hashes --requirement deploy/requirements-worker.lock{expected[1]}")
    (package,) = locks.parsed((tmp_path / "torch.lock").read_text()).values()
    assert package in (ROOT / "deploy/requirements-worker.lock").read_text()


def test_hadolint_finds_nothing() -> None:
    found = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("needs the extra `deploy`")
    done = subprocess.run([found, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_no_image_has_a_variable_that_its_settings_file_would_contradict() -> None:
    """The chart's pods have TESSERA_DATABASE_URL_FILE, and a coordinator refuses both."""
    given = dict(pair.split("=", 1) for line in whole("coordinator").said("ENV") for pair in shlex.split(line))
    fields = CoordinatorSettings.model_fields
    replaced = {f"TESSERA_{name}".upper() for name in fields if f"{name}_file" in fields}
    assert "TESSERA_DATABASE_URL" in replaced
    assert replaced & given.keys() == set()
