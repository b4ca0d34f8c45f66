"""`import tessera`: runs that are started, watched, compared and exported from Python and by command."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from sqlalchemy import update

import tessera
from tessera.coordinator.db.tables import VersionRow
from tessera.examples.notebook import EXECUTED, NOTEBOOK, sources_digest
from tessera.session import Run, Session
from tessera.shared.api.runs import Evaluation
from tessera.shared.metrics.comparison import BestVersion
from tessera.shared.metrics.extras import EXTRAS, extra
from tessera.shared.problems import Problem
from tessera.shared.version import install_line
from tests.support import cli
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.paths import ROOT

MODEL = small_model()
ACCURACIES = (0.1, 0.9, 0.3)
"""Of versions 0 to 2."""


def test_import_tessera_imports_nothing_else() -> None:
    program = "import sys, tessera; dir(tessera); print({'torch', 'httpx', 'pydantic'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_public_name_is_there() -> None:
    for name in tessera.__all__:
        assert getattr(tessera, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        tessera.conect  # type: ignore[attr-defined]  # noqa: B018


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path_factory.mktemp("coordinator")) as live:
        yield live


@pytest.fixture(scope="module")
def session(coordinator: LiveCoordinator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A session with a token in a file, which counts although the environment has another one."""
    file = tmp_path_factory.mktemp("session") / "token"
    file.write_text(coordinator.token("admin"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESSERA_TOKEN", "unknown")
        patch.setenv("TESSERA_URL", coordinator.url)
        made = tessera.connect(token_file=file)
    with made:
        yield made


@pytest.fixture
def hung_up() -> Iterator[tuple[str, list[int]]]:
    """The URL of something that closes each connection, and a list as long as there were connections."""
    asked: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    connection, (_, port) = listener.accept()
                    asked.append(port)
                    connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_wrong_address_is_told_after_one_attempt_from_python_and_by_command(
    hung_up: tuple[str, list[int]], tmp_path: Path
) -> None:
    url, asked = hung_up
    with pytest.raises(tessera.Problem, match="no answer from the coordinator"):
        tessera.connect(url, "x")
    assert len(asked) == 1
    config = str(tmp_path / "worker.toml")
    for words in (("run", "watch", "x"), ("admin", "status", "--watch"),
                  ("worker", "join", url, "--site", "x", "--config", config)):  # fmt: skip
        answer = cli.tessera(*words, TESSERA_URL=url, TESSERA_TOKEN="x")
        assert (answer.returncode, "no answer from the coordinator" in answer.stderr) == (1, True), answer.stderr
    assert len(asked) == 4


@pytest.fixture(scope="module")
def first(coordinator: LiveCoordinator, session: Session) -> Run:
    """A run of two rounds at one site, whose version 1 is the best."""
    client = coordinator.client("site", "north")
    worker = ScriptedWorker(client, kinds=("train", "evaluate"), held_out={"data": 4}).enrol()
    run = start_run(session.client, MODEL, values(MODEL), name="first", rounds=2, evaluation=Evaluation(sites=True))
    for number, accuracy in enumerate(ACCURACIES):
        worker.evaluate(worker.take(), accuracy=accuracy)
        if number < len(ACCURACIES) - 1:
            worker.train(worker.take())
    return session.run(run.id).watch()


def say(coordinator: LiveCoordinator, *arguments: str) -> subprocess.CompletedProcess[str]:
    return cli.tessera(*arguments, TESSERA_URL=coordinator.url, TESSERA_TOKEN=coordinator.token("admin"))


def test_a_run_is_watched_compared_exported_and_continued(
    session: Session, first: Run, coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    assert (first.state, first.best()) == ("completed", BestVersion(1, "accuracy", "accuracy", 0.9, ("north",), 1))
    table = first.table()
    assert list(table["accuracy"]) == [0.9, 0.3]
    assert (table["upload_bytes"] > 0).all()
    assert set(first.metrics()["stage"]) >= {"train", "sites", "fairness"}

    # Scripted workers add one to every block in each round, so version 1 is the start plus one.
    out = first.export(tmp_path / "best.safetensors", version="best")
    expected = values(MODEL)["head.weight"] + 1
    assert np.allclose(load_file(out)["head.weight"], expected)

    with pytest.warns(UserWarning, match="1 would take part now, fewer than the quorum of 2"):
        second = session.start({**first.settings, "name": "second", "cohort": {"quorum": 2}}, start_from="first@best")
    assert session.client.manifest(second.record.spec.version) == session.client.manifest(
        next(v.digest for v in session.client.versions(first.id, 1))
    )
    found = session.compare(first, "second")
    assert list(found.settings().index) == ["version", "cohort.quorum"]
    assert found.settings().loc["cohort.quorum"].tolist() == [1, 2]
    assert found.table()["first", "accuracy"].tolist() == list(ACCURACIES)
    assert "first: best 1 (accuracy 0.900) at 1 of 1 site: north; second: best not measured" in repr(found)

    chart = found.plot().save(tmp_path / "scores.svg").read_text()
    assert found.plot()._repr_svg_() == chart
    assert chart.startswith("<svg ")
    assert {f">{name}<" in chart for name in ("accuracy", "first", "second")} == {True}
    assert ">second<" not in first.plot("accuracy")._repr_svg_()
    with pytest.raises(Problem, match="no version of second has been evaluated"):
        second.plot()

    by_command = say(coordinator, "run", "compare", "first", "second").stdout
    assert re.search(r"cohort\.quorum +1 +2 *\n", by_command)
    assert re.search(r"first +\S+ +completed +2 +1 \(accuracy 0\.900\)", by_command)
    assert re.search(r"best version +1 \(accuracy 0\.900\)", shown := say(coordinator, "run", "show", "first").stdout)
    assert len(re.findall(r" best *\n", shown)) == 1


def test_commands_and_python_agree_on_what_a_score_took_and_say_that_one_was_never_reached(
    session: Session, first: Run, coordinator: LiveCoordinator
) -> None:
    found = first.convergence(0.9, 0.99)
    assert found
    reached, never = found.reached
    table = first.table().query("attempt == 1")
    assert (reached.rounds, never.reached) == (1, False)
    assert (reached.download_bytes, reached.upload_bytes) == (table["download_bytes"][0], table["upload_bytes"][0])
    shown = json.loads(say(coordinator, "run", "show", "first", "--score", "0.9", "--score", "0.99", "--json").stdout)
    assert shown["convergence"]["reached"] == [asdict(one) for one in found.reached]
    told = say(coordinator, "run", "show", "first", "--score", "0.99").stdout
    assert re.search(r"accuracy 0\.99 or more +never up to version 2; the best is 0\.9 ", told)
    exported = say(coordinator, "run", "metrics", "first", "--score", "0.9").stdout
    assert f"accuracy.to_0.9.bytes,{float(reached.bytes or 0)}" in exported
    start_run(session.client, MODEL, values(MODEL), name="unmeasured")
    assert first.compare("unmeasured", reach=[0.9]).runs[0].convergence == first.convergence(0.9)
    compared = say(coordinator, "run", "compare", "first", "unmeasured", "--score", "0.9").stdout
    assert re.search(r"first +accuracy 0\.9 or more +round 1: ", compared)


def test_a_run_starts_by_command_from_another_with_its_settings(
    session: Session, first: Run, coordinator: LiveCoordinator
) -> None:
    made = say(coordinator, "run", "create", "--from", "first@1", "--set", "name=again", "--set", "rounds=5")
    again = session.run(made.stdout.strip())
    assert (again.name, again.record.spec.rounds) == ("again", 5)
    assert {**again.settings, "name": "first", "rounds": 2} == first.settings
    assert "starts from version 1 of first" in made.stderr


class WithoutPreview(LiveCoordinator):
    """A coordinator at which each preview fails."""

    def app(self) -> Any:
        app = super().app()

        async def failing(scope: Any, receive: Any, send: Any) -> None:
            absent = {**scope, "path": "/v1/absent", "raw_path": b"/v1/absent"}
            await app(absent if scope.get("path") == "/v1/runs/preview" else scope, receive, send)

        return failing


def test_a_run_starts_although_its_preview_fails(tmp_path: Path) -> None:
    with WithoutPreview(tmp_path / "coordinator") as coordinator:
        first = start_run(coordinator.client(), MODEL, values(MODEL), name="first")
        with tessera.connect(coordinator.url, coordinator.token("admin")) as session:
            with pytest.raises(tessera.Problem, match="absent"):
                session.preview(start_from="first")
            second = session.start(start_from="first")
            assert second.settings == session.run(first.id).settings


REFUSALS = (
    (("compare", "first"), 2, "needs two or more different runs, not first"),
    (("compare", "first", "first"), 2, "Name each run once"),
    (("compare", "first", "frist"), 1, "there is no run 'frist'; did you mean 'first'?"),
    (("compare", "first", "plain", "--metric", "accuracies"), 2, "none of these runs has the score 'accuracies'"),
    (("export", "plain", "x.safetensors", "--version", "best"), 2, "no version of run plain has been evaluated"),
    (("export", "first", "x.safetensors", "--version", "9"), 1, "It has the versions 0 to 2"),
    (("export", "first", "x.safetensors", "--version", "-1"), 2, "'-1' is not a version"),
    (("create", "--from", "plain@best"), 2, "no version of run plain has been evaluated"),
    (("create", "--from", "plain@"), 2, "'' is not a version"),
    (("create",), 2, "Give --model FOLDER or --from RUN[@VERSION]"),
    (("create", "--model", "x"), 2, "a run from a model folder needs a run file"),
    (("create", "--from", "plain", "--set", "roundz=2"), 2, "/roundz"),
)


def test_a_refusal_says_what_is_wrong_and_what_to_do(
    session: Session, first: Run, coordinator: LiveCoordinator
) -> None:
    start_run(session.client, MODEL, values(MODEL), name="plain")
    for arguments, code, expected in REFUSALS:
        done = say(coordinator, "run", *arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert expected in " ".join(done.stderr.split())


def test_a_version_that_is_no_longer_kept_is_named_with_those_that_are(
    first: Run, coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    database = coordinator.services.database
    of_best = (VersionRow.run_id == first.id) & (VersionRow.number == 1)
    with database.transaction() as rows:
        rows.execute(update(VersionRow).where(of_best).values(retired_at=0.0))
    try:
        with pytest.raises(tessera.Problem, match=r"best version of run first, 1 .* kept is 2 \(accuracy 0\.300\)"):
            first.export(tmp_path / "out", version="best")
        with pytest.raises(tessera.Problem, match=r"version 1 of run first is no longer kept .* the versions 0, 2\."):
            first.export(tmp_path / "out", version=1)
    finally:
        with database.transaction() as rows:
            rows.execute(update(VersionRow).where(of_best).values(retired_at=None))


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tessera.shared.metrics.data_frames", raising=False)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(tessera.Problem, match=rf"(?s)pandas.*{re.escape(install_line(EXTRAS['data_frames']))}"):
        extra("data_frames")


# ---------------------------------------------------------------- the notebook


def notebook(path: Path = NOTEBOOK) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_the_notebooks_outputs_are_those_of_its_cells() -> None:
    """If this fails, a cell was edited: `make notebook` executes all again."""
    found = notebook()
    assert found["metadata"]["tessera"][EXECUTED] == sources_digest(found)
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    # Each method that a cell uses exists, so that a renamed one is noticed without executing it.
    used = {
        name
        for cell in code
        for name in re.findall(r"\b(?:session|baseline|frozen|comparison)\.(\w+)\(", "".join(cell["source"]))
    }
    assert [
        name for name in used if not any(hasattr(kind, name) for kind in (Session, Run, tessera.Comparison))
    ] == []


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_notebooks_cells_run_and_its_runs_end(tmp_path: Path) -> None:
    out = tmp_path / "executed.ipynb"
    command = [sys.executable, "-m", "tessera.examples.notebook", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=cli.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = [
        line for cell in notebook(out)["cells"] for one in cell.get("outputs", []) for line in one.get("text", [])
    ]
    assert [line for line in written if line.startswith(("baseline is", "frozen is"))] == [
        "baseline is completed\n",
        "frozen is completed\n",
    ]
