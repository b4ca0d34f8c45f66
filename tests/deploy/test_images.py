"""The Dockerfile, without an engine that could build it: what it says, and that its commands do what they should."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from release import locks
from tessera.coordinator.settings import CoordinatorSettings
from tests.support.coordinator import LiveCoordinator, until
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
        if instruction == "FROM":
            base, _, name = argument.partition(" AS ")
            found[name] = Stage(base)
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
    assert kept == {source for line in stages()["build"].said("COPY") for source in line.split()[:-1]}


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
    torch_alone, rest, itself = said.splitlines()
    assert torch_alone.endswith(f" install --require-hashes --no-deps{expected[0]} --requirement torch.lock")
    assert rest.endswith(f" install --require-hashes --requirement deploy/requirements-worker.lock{expected[1]}")
    assert itself.endswith(" install --no-deps .")
    (package,) = locks.parsed((tmp_path / "torch.lock").read_text()).values()
    assert package in (ROOT / "deploy/requirements-worker.lock").read_text()


def test_hadolint_finds_nothing() -> None:
    found = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("needs the extra `deploy`")
    done = subprocess.run([found, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


# ---------------------------------------------------------------- the commands themselves


def test_no_image_has_a_variable_that_its_settings_file_would_contradict() -> None:
    """The chart's pods have TESSERA_DATABASE_URL_FILE, and a coordinator refuses both."""
    given = dict(pair.split("=", 1) for line in whole("coordinator").said("ENV") for pair in shlex.split(line))
    fields = CoordinatorSettings.model_fields
    replaced = {f"TESSERA_{name}".upper() for name in fields if f"{name}_file" in fields}
    assert "TESSERA_DATABASE_URL" in replaced
    assert replaced & given.keys() == set()


class Tree:
    """A folder that stands for an image's root: its paths in place of those of the Dockerfile."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self._paths = {
            "/opt/tessera": str(folder / "opt"),
            "/etc/tessera": str(folder / "etc"),
            "/data": str(folder / "data"),
            "8470": str(port),
        }

    def put(self, text: str) -> str:
        for theirs, ours in self._paths.items():
            text = text.replace(theirs, ours)
        return text

    def build(self, target: str) -> None:
        """Installs as the Dockerfile does, by its own commands, into an environment without pip."""
        python = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
        subprocess.run([python, "-m", "venv", self.folder / "base"], check=True)
        source = self.folder / "src"
        for line in stages()["build"].said("COPY"):
            *names, to = line.split()
            for name in names:
                for found in ROOT.glob(name):
                    there = source / (to + found.name if to.endswith("/") else to)
                    there.parent.mkdir(parents=True, exist_ok=True)
                    if found.is_dir():
                        shutil.copytree(found, there, ignore=shutil.ignore_patterns("__pycache__"))
                    else:
                        shutil.copy(found, there)
        # Whether pip finds the CPU build here is for its own configuration, as in `make install`.
        cpu = self.folder / "no-index" if torch.__version__.endswith("+cpu") else ""
        there = {"PATH": f"{self.folder / 'base' / 'bin'}:/usr/bin:/bin", "TORCH_INDEX": str(cpu)}
        for stage in ("build", f"build-{target}"):
            for command in stages()[stage].said("RUN"):
                subprocess.run(["sh", "-ec", self.put(command)], cwd=source, env={**os.environ, **there}, check=True)
        assert not list((self.folder / "opt" / "bin").glob("pip*"))

    def environment(self, target: str) -> dict[str, str]:
        """What the image sets, and of ours the port, and that it need do no TLS."""
        pairs = (shlex.split(self.put(line)) for line in whole(target).said("ENV"))
        given = dict(pair.split("=", 1) for line in pairs for pair in line)
        given["TESSERA_BEHIND_PROXY"] = "true"
        return {**given, "PATH": f"{self.folder / 'opt' / 'bin'}:/usr/bin:/bin", "TESSERA_PORT": self.put("8470")}

    def start(self, target: str, log: Path) -> subprocess.Popen[bytes]:
        """The image's command as its user, without any right, where nothing but /data and /tmp can be written."""
        command = [
            *json.loads(self.put(whole(target).said("ENTRYPOINT")[0])),
            *json.loads(self.put(whole(target).said("CMD")[0])),
        ]
        data = self.folder / "data"
        data.mkdir()
        os.chown(data, USER, USER)
        confine = (
            f"mount --bind {data} {data} && mount -t tmpfs -o mode=1777 tmpfs /tmp && mount -o remount,bind,ro / "
            f"&& exec setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs --bounding-set=-all "
            f'--inh-caps=-all sh -c \'! touch {self.folder}/written 2>/dev/null && exec "$@"\' sh "$@"'
        )
        with log.open("wb") as out:
            return subprocess.Popen(
                ["unshare", "--mount", "sh", "-ec", confine, "sh", *command],
                env=self.environment(target),
                cwd="/",
                stdout=out,
                stderr=out,
            )

    def healthy(self, target: str) -> bool:
        """What the image's HEALTHCHECK says."""
        return not subprocess.run(
            json.loads(self.put(health_check(target))), env=self.environment(target), capture_output=True, check=False
        ).returncode


@pytest.fixture
def tree() -> Iterator[Tree]:
    if os.geteuid() != 0:
        pytest.skip("only root can make a tree read-only and become another user")
    # Where the other user may come, and which no test's own /tmp hides.
    folder = Path(tempfile.mkdtemp(prefix="tessera-image-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield Tree(folder, free_port())
    shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_an_image_s_commands_run_as_nobody_on_a_read_only_tree(tree: Tree, target: str) -> None:
    tree.build(target)
    (tree.folder / "etc").mkdir()
    (tree.folder / "etc" / "worker.toml").write_text(
        'url = "http://127.0.0.1:9"\ntoken = "none"\nname = "w"\n'
        f'audit_key = "{"0" * 64}"\n[datasets.digits]\nkind = "digits"\n'
    )
    log = tree.folder / "log"
    process = tree.start(target, log)
    try:
        until(lambda: process.poll() is not None or tree.healthy(target), 120)
        assert process.poll() is None, log.read_text()
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert re.search(r"^Uid:\t10001\t10001", status, re.MULTILINE)
        assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM), log.read_text()
        assert not (tree.folder / "written").exists()
    finally:
        process.kill()
        process.wait()
