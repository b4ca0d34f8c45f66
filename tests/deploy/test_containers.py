"""The images, built from the Dockerfile, and the federation of deploy/compose.yaml, started from them."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from release import images
from release.images import Engine
from tessera.examples.digits import reload
from tessera.shared.client.client import Client
from tests.support.cli import tessera
from tests.support.containers import Composition, build_postgresql, missing
from tests.support.coordinator import until
from tests.support.paths import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]
URL = "http://127.0.0.1:8470"
SITES = ("north", "south", "west")
# A container that other work slows down; what is checked is that it comes up at all.
PATIENCE = 300.0
# Of the files of an image on a base of Debian's packages.
MOST_BYTES = {"tessera-coordinator": 360_000_000, "tessera-worker": 1_450_000_000}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine with both images, from their archives."""
    if why := missing():
        pytest.skip(why)
    with images.engine() as made:
        for image in images.IMAGES:
            made.run("podman", "load", "--quiet", "--input", made.build(image))
        yield made


@pytest.fixture(scope="module")
def federation(engine: Engine) -> Iterator[Composition]:
    """All services of deploy/compose.yaml, with data of their own."""
    build_postgresql(engine)
    folder = Path(tempfile.mkdtemp(prefix="tessera-compose-", dir="/var/tmp"))
    for name in ("compose.yaml", "join.sh", "secrets.sh", "worker.toml"):
        shutil.copy(ROOT / "deploy" / name, folder)
    engine.run("sh", folder / "secrets.sh")
    composition = Composition(engine, folder / "compose.yaml")
    try:
        for service in ("database", "migrate", "coordinator", "conductor", "join", *SITES):
            composition.start(service, PATIENCE)
        yield composition
    finally:
        composition.remove()
        shutil.rmtree(folder)


@pytest.fixture
def client(federation: Composition) -> Iterator[Client]:
    token = (federation.file.parent / "data" / "tokens" / "admin" / "token").read_text().strip()
    with Client(URL, token) as made:
        yield made


@pytest.mark.parametrize("image", images.IMAGES)
def test_an_image_is_no_larger_than_it_need_be(engine: Engine, image: str) -> None:
    assert json.loads(engine.run("podman", "image", "inspect", image))[0]["Size"] < MOST_BYTES[image]


@pytest.mark.parametrize("image", images.IMAGES)
def test_an_image_can_install_nothing_and_has_what_it_imports_compiled(engine: Engine, image: str) -> None:
    look = (
        "import importlib.util as i, pathlib, tessera.shared.cli.main as m; "
        "print(i.find_spec('pip'), pathlib.Path(m.__cached__).exists())"
    )
    run = ("podman", "run", "--rm", "--read-only", "--entrypoint", "python", image, "-c")
    assert engine.run(*run, look).split() == ["None", "True"]


def test_each_service_runs_as_nobody_without_rights_on_a_read_only_root(federation: Composition) -> None:
    for service in ("database", "coordinator", "conductor", *SITES):
        process = federation.inspect(service)["State"]["Pid"]
        status = Path(f"/proc/{process}/status").read_text()
        assert re.search(r"^Uid:\t10001\t10001\t10001\t10001$", status, re.MULTILINE), service
        for held in ("CapEff", "CapPrm", "CapBnd"):
            assert re.search(rf"^{held}:\t0+$", status, re.MULTILINE), (service, held)
        assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE), service
        write = "! touch /opt/written && ! touch /etc/written && touch /tmp/written /data/written && rm /data/written"
        federation.engine.run("podman", "exec", federation.container(service), "sh", "-c", write)


def test_a_run_goes_on_after_a_kill_of_the_coordinator_of_the_conductor_and_of_a_worker(
    federation: Composition, client: Client, tmp_path: Path
) -> None:
    asked = {"TESSERA_URL": URL, "TESSERA_TOKEN_FILE": str(federation.file.parent / "data/tokens/admin/token")}
    model, file, config = str(tmp_path / "model"), str(tmp_path / "run.toml"), str(ROOT / "examples/digits/vit.json")
    for line in (
        ["model", "init", model, "--config", config, "--head", "image-classification", "--random"],
        ["run", "init", "fedavg", "--dataset", "digits", "--out", file],
        ["run", "create", file, "--model", model, "--set", "cohort.size=3", "--set", "rounds=40"],
    ):
        done = tessera(*line, **asked)
        assert done.returncode == 0, done.stderr
    (run,) = client.runs()

    for number, service in enumerate(("coordinator", "conductor", "north"), start=1):
        until(lambda number=number: client.run(run.id).version.number >= number, PATIENCE)
        federation.kill(service, PATIENCE)
    until(lambda: client.run(run.id).state == "completed", PATIENCE)
    rounds = [round_ for round_ in client.rounds(run.id) if round_.state == "committed"]
    assert [round_.number for round_ in rounds] == [*range(1, 41)]
    exported = tmp_path / "exported"
    assert tessera("run", "export", run.id, str(exported), "--model", model, **asked).returncode == 0
    assert reload.measure(exported).accuracy > 0.5
    for service in ("coordinator", "conductor", *SITES):
        assert "Traceback" not in federation.log(service), federation.log(service)
