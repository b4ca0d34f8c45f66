"""An examination names what is not well, and goes on to its end."""

from __future__ import annotations

import json
import re
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from click.testing import Result
from typer.testing import CliRunner

from tessera.shared.api.tasks import TaskView
from tessera.shared.diagnostics import Finding, examined
from tessera.shared.units import size
from tessera.shared.urls import is_loopback, without_password
from tessera.shared.version import install_line
from tessera.worker import doctor as doctor_checks
from tessera.worker.cli.worker import app
from tessera.worker.doctor import checks, clock, expiry, forecast, under_way, way_to
from tessera.worker.executor.folder import INVENTORY, InventoryRecord, read_document
from tessera.worker.executor.rank import Rank
from tessera.worker.governance.descriptions import policy_in_words
from tessera.worker.governance.policy import Policy
from tessera.worker.model.four_bits import REMEDY, library
from tessera.worker.settings import WorkerSettings
from tessera.worker.training.optimization.precision import multiplies_bfloat16
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, model_folder, small_model, start_run, values
from tests.support.pretrained import bert_tokenizer
from tests.support.tasks import CPU

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)

SETTINGS = """
url = "{url}"
token = "{token}"
name = "w"
state_dir = "{folder}/state"
cache_bytes = 1000
device = "cpu"
[datasets.digits]
kind = "digits"
held_out = 0.2
"""


def doctor(folder: Path, url: str, token: str, more: str = "") -> tuple[Result, list[dict[str, Any]]]:
    file = folder / "worker.toml"
    file.write_text(SETTINGS.format(url=url, token=token, folder=folder) + more)
    said = CliRunner().invoke(app, ["doctor", "--config", str(file), "--json"])
    begin = said.stdout.index("{\n")
    return said, json.JSONDecoder().raw_decode(said.stdout, begin)[0]["findings"]


def named(findings: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(found for found in findings if found["name"] == name)


def test_a_folder_that_cannot_be_written_is_named_with_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "state").symlink_to(tmp_path / "nowhere")
    _, findings = doctor(tmp_path, "http://127.0.0.1:1", "any")
    disk = named(findings, "disk")
    assert disk["verdict"] == "fail"
    assert f"{tmp_path}/state: File exists; " in disk["detail"]
    assert " are needed, " in disk["detail"]


def test_a_worker_that_could_work_is_told_so_line_by_line(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    said, findings = doctor(tmp_path, coordinator.url, coordinator.token("site", "a"))
    assert said.exit_code == 0, findings
    assert [found["name"] for found in findings if found["verdict"] == "fail"] == []
    names = [found["name"] for found in findings]
    wanted = ("dns", "tcp", "tls", "coordinator", "protocol", "clock", "token", "disk", "device", "policy", "line")
    assert set(wanted) <= set(names)
    # Nothing is in between.
    assert {"bodies", "long poll"}.isdisjoint(names)
    # Of the 1,437 digits that are for training about a fifth is held out.
    detail = named(findings, "data digits")["detail"]
    told = re.match(r"approximately (\d+) examples, 10 classes, (\d+) held out", detail)
    assert told
    assert sum(map(int, told.groups())) == 1437
    (half,) = (found["detail"] for found in findings if "bfloat16" in found["detail"])
    assert ("no instructions" in half) != multiplies_bfloat16()
    assert named(findings, "compute")["detail"] == "TF32 is off, compilation is off (compute)"


def test_a_base_in_4_bits_without_its_library_stops_the_worker_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = WorkerSettings(
        url="http://127.0.0.1:1", token="t", name="w", state_dir=tmp_path, device="cpu", compute={"base_bits": 4},
        datasets={"digits": {"kind": "digits"}},
    )  # fmt: skip
    assert doctor_checks._compute(settings).detail.endswith(", bases beside adapters are in 4 bits")
    library.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    found = doctor_checks._compute(settings)
    assert (found.verdict, found.remedy) == ("fail", REMEDY)
    home = tmp_path / "executor" / "home"
    home.mkdir(parents=True)
    Rank(home, [CPU], None, settings.sources).load(needs_library=True)
    fault = read_document(InventoryRecord, home.parent / INVENTORY).fault or ""
    assert re.search(rf"needs bitsandbytes .*: {re.escape(install_line('quantized'))}", fault)


def test_compilation_without_a_compiler_is_warned_of(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    _, findings = doctor(tmp_path, coordinator.url, coordinator.token("site", "a"), "[compute]\ncompile = true\n")
    assert named(findings, "compute")["verdict"] == "warn"
    assert "no C++ compiler" in named(findings, "compute")["detail"]


def test_what_fails_is_named_with_a_remedy_and_the_rest_is_looked_at(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    broken = '[datasets.gone]\nkind = "arrays"\nfile = "/nowhere.safetensors"\n'
    said, findings = doctor(tmp_path, coordinator.url, coordinator.token("viewer"), broken)
    assert said.exit_code == 1
    failed = {found["name"]: found for found in findings if found["verdict"] == "fail"}
    assert set(failed) == {"token", "data gone", "line"}
    assert failed["token"]["remedy"] == "Ask an administrator for a token of role site."
    assert "/nowhere.safetensors" in failed["data gone"]["detail"]
    (opened,) = [found for found in findings if found["name"] == "policy" and found["verdict"] == "warn"]
    assert opened["detail"] == "Any block may leave; at most 17.2 GB at a time. No person approves it."
    assert "approve_runs = true" in opened["remedy"]


WEAK = "require_privacy = { epsilon = 900, delta = 1e-5 }\n"


def test_a_policy_that_shuts_out_all_by_a_slip_is_a_warning(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    policy = (
        '[policy]\nairlock = true\nmethods = ["fedavgg", "fedper"]\ndatasets = ["digit"]\nmodels = ["bert", "vitt"]\n'
    )
    _, findings = doctor(
        tmp_path, coordinator.url, coordinator.token("site", "a"), policy + "orchestrators = []\n" + WEAK
    )
    warned = {found["detail"]: found["remedy"] for found in findings if found["verdict"] == "warn"}
    assert {detail: remedy for detail, remedy in warned.items() if "cache_bytes" not in detail} == {
        "methods: nothing called 'fedavgg' is installed": "Did you mean 'fedavg'?",
        "datasets: nothing called 'digit' is in the settings": "Did you mean 'digits'?",
        "models: nothing called 'vitt' is known to transformers": "Did you mean 'vit'?",
        "orchestrators is empty: every run is refused": "Name some, or remove policy.orchestrators to allow any.",
        "Runs that train need privacy: at most epsilon 900 at delta 1e-05 (epsilon 900: no protection) for each "
        "example.": "Set epsilon to 10 or less.",
    }


def test_a_run_under_way_is_told_with_its_next_upload(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    worker = ScriptedWorker(coordinator.client("site", "a"))
    start_run(coordinator.client(), small_model(), values(small_model()), rounds=2)
    worker.train(worker.take())
    worker.take()
    slow = "[policy]\nmax_upload_bytes_per_second = 16384\n"
    _, findings = doctor(tmp_path, coordinator.url, coordinator.token("site", "a"), slow)
    task = next(worker.client.tasks())
    fetched = size(task.download_bytes)
    told = f"run test sends {size(task.upload_bytes)} a round, less than a second; the last fetched {fetched}"
    assert named(findings, "runs")["detail"] == told


def test_a_run_that_begins_is_told_with_what_it_sends_at_most(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    worker = ScriptedWorker(coordinator.client("site", "a"))
    start_run(coordinator.client(), small_model(), values(small_model()))
    worker.take()
    _, findings = doctor(tmp_path, coordinator.url, coordinator.token("site", "a"))
    assert f"at most its whole model: {size(small_model().nbytes)} a round" in named(findings, "runs")["detail"]


@pytest.mark.parametrize(("use", "verdicts"), [("train", ["ok", "warn"]), ("evaluate", ["ok"])])
def test_a_worker_that_would_measure_nothing_is_told(tmp_path: Path, use: str, verdicts: list[str]) -> None:
    source = {"kind": "digits", "split": "test", "use": use}
    given = {"url": "http://127.0.0.1:9", "token": "t", "name": "w", "state_dir": tmp_path, "kinds": ["evaluate"]}
    found = list(dict(checks(WorkerSettings(**given, datasets={"test": source}), probe=False))["data test"]())
    assert [one.verdict for one in found] == verdicts


@pytest.mark.parametrize(
    ("least", "details"), [(360, []), (361, ["versions are not measured on it: 360 examples are fewer than "])]
)
def test_too_few_examples_to_measure_versions_on_are_warned_of(
    tmp_path: Path, least: int, details: list[str]
) -> None:
    source = {"kind": "digits", "split": "test", "use": "evaluate"}
    given = {"url": "http://127.0.0.1:9", "token": "t", "name": "w", "state_dir": tmp_path, "kinds": ["evaluate"]}
    settings = WorkerSettings(**given, datasets={"test": source}, policy={"min_evaluation_examples": least})
    _, *warnings = dict(checks(settings, probe=False))["data test"]()
    assert [one.detail for one in warnings] == [f"{detail}min_evaluation_examples, {least}" for detail in details]


def test_a_trainer_on_images_without_kornia_is_told_what_it_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kornia", None)
    given = {"url": "http://127.0.0.1:9", "token": "t", "name": "w", "state_dir": tmp_path}
    settings = WorkerSettings(**given, datasets={"test": {"kind": "digits"}})
    _, warning = dict(checks(settings, probe=False))["data test"]()
    assert (warning.verdict, warning.remedy) == (
        "warn",
        f"If it should take part in them: {install_line('augmentation')}",
    )
    assert "offered no run that changes images" in warning.detail


def test_the_policy_is_tried_on_a_model_before_any_run_asks(tmp_path: Path) -> None:
    given = {"url": "http://127.0.0.1:9", "token": "t", "name": "w", "state_dir": tmp_path}
    folder = model_folder(tmp_path / "model", small_model())
    policy = {"never_send": ["*mlp*", "haed"]}
    settings = WorkerSettings(**given, datasets={"test": {"kind": "digits"}}, policy=policy)
    _, plain, *_ = (check for name, check in checks(settings, probe=False, model=folder) if name == "policy")
    misspelt, kept, none = plain()
    assert (misspelt.verdict, kept.verdict) == ("fail", "ok")
    assert "no block called 'haed', so that this rule protects nothing; did you mean `*head*`" in misspelt.detail
    assert "'*mlp*' keeps 1 of 6 blocks (layer.0.mlp.weight)" in kept.detail
    assert "'haed' keeps 0 of 6 blocks" in none.detail
    (warning,) = (one for one in dict(checks(settings, probe=False))["policy"]() if one.verdict == "warn")
    assert warning.remedy.startswith("Did you mean '*haed*'?")


def test_unknown_words_of_a_data_set_are_reported(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("text,label\nthe cat,0\nthe bird,0\n")
    tokenizer = bert_tokenizer(tmp_path / "bert", ["the"])
    source = {"kind": "text", "file": str(tmp_path / "notes.csv"), "tokenizer": str(tokenizer)}
    given = {"url": "http://127.0.0.1:9", "token": "t", "name": "w", "state_dir": tmp_path}
    loaded, warning = dict(checks(WorkerSettings(**given, datasets={"test": source}), probe=False))["data test"]()
    assert "2 examples, 1 classes, 50.0% of tokens unknown" in loaded.detail
    assert (warning.verdict, warning.detail) == ("warn", "the tokenizer does not know 50% of the tokens")


@pytest.mark.parametrize(("held_out", "warned"), [(0.5, True), (None, False)])
def test_a_patient_on_both_sides_of_the_split_is_warned_of(
    tmp_path: Path, held_out: float | None, *, warned: bool
) -> None:
    rows = [f"report {number},{number % 2},p{number // 3}" for number in range(60)]
    (tmp_path / "notes.csv").write_text("\n".join(["text,label,Pat-ID", *rows]) + "\n")
    source = {"kind": "text", "file": str(tmp_path / "notes.csv"), "tokenizer": "run"}
    source |= {} if held_out is None else {"held_out": held_out}
    given = {"url": "http://127.0.0.1:9", "token": "t", "name": "w", "state_dir": tmp_path}
    for group, expected in (({}, warned), ({"group": "Pat-ID"}, False)):
        settings = WorkerSettings(**given, datasets={"test": source | group})
        _, *warnings = dict(checks(settings, probe=False))["data test"]()
        found = [one for one in warnings if "column 'Pat-ID' has 20 values in 60 examples" in one.detail]
        assert bool(found) == expected
        assert all('group = "Pat-ID"' in one.remedy for one in found)


def test_a_forecast_is_of_runs_that_ask_for_something_now() -> None:
    def task(run: str, state: str, sent: int = 0) -> TaskView:
        return TaskView(
            id=f"{run}-{state}", run=run, round=1, worker="a/w", kind="train", state=state, token=1, attempts=1,
            upload_bytes=sent, download_bytes=2_000_000,
        )  # fmt: skip

    tasks = [
        task("over", "accepted", 5),
        task("on", "accepted", 41_000_000),
        task("on", "leased"),
        task("new", "offered"),
    ]
    asking = under_way(tasks)
    assert asking == {"on": tasks[1], "new": None}
    told = "run trial sends 41.0 MB a round, about 35 s; the last fetched 2.0 MB"
    assert forecast("trial", asking["on"], 440_000_000, 1_171_000.0) == told
    told = "run trial has a task here, and sends at most its whole model: 440.0 MB a round"
    assert forecast("trial", None, 440_000_000, None) == told


def test_the_policy_is_told_in_words() -> None:
    told = " ".join(policy_in_words(Policy(orchestrators=("trial",), hours=("Sat 10:00-12:00",), airlock=True)))
    assert "Runs of trial may ask." in told
    assert "A person approves each run: no; releases each update: yes." in told
    assert "It works Sat 10:00-12:00." in told


# ---------------------------------------------------------------- the way


def way(url: str, verify: ssl.SSLContext | None = None) -> dict[str, Finding]:
    return {found.name: found for found in way_to(url, verify or httpx.create_ssl_context())}


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_the_first_step_that_fails_is_where_it_ends() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        found = way(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert [(name, one.verdict) for name, one in found.items()] == [("proxy", "ok"), ("dns", "ok"), ("tcp", "fail")]
    assert way("http://nowhere.invalid")["dns"].verdict == "fail"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "none"),
        ({"http_proxy": "http://p:1"}, "none: HTTP_PROXY is not for https:// URLs"),
        ({"https_proxy": "http://p:1", "no_proxy": ".invalid"}, "none: NO_PROXY lists the coordinator's host"),
    ],
)
def test_a_proxy_that_is_not_used_is_told_with_the_reason(
    given: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = way("https://nowhere.invalid")
    assert found["proxy"].detail == told
    assert "set HTTPS_PROXY=http://PROXY:PORT" in found["dns"].remedy


def test_a_path_that_the_coordinator_does_not_have_is_named(coordinator: LiveCoordinator) -> None:
    found = way(f"{coordinator.url}/tessera/tessera")["coordinator"]
    assert found.verdict == "fail"
    assert found.remedy == f'Set url = "{coordinator.url}": the coordinator is there.'


def test_a_proxy_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://me:hunter2@127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    found = way("http://tessera.example")
    assert found["proxy"].detail == "requests go by http://me:***@127.0.0.1:9"
    assert found["coordinator"].verdict == "fail"
    assert found["coordinator"].remedy.startswith("The cause may be the proxy")


@contextmanager
def untrusted() -> Iterator[int]:
    """A port that speaks TLS with a certificate of a CA that nobody knows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            # One is the connection that is only tried.
            for _ in range(2):
                accepted, _ = server.accept()
                try:
                    context.wrap_socket(accepted, server_side=True).close()
                except OSError:
                    accepted.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join(10)


def test_a_certificate_of_an_unknown_ca_is_not_trusted() -> None:
    with untrusted() as port:
        found = way(f"https://127.0.0.1:{port}")
    assert found["tls"].verdict == "fail"
    assert "unable to get local issuer certificate" in found["tls"].detail
    assert "coordinator" not in found


def test_a_certificate_that_ends_soon_is_a_warning() -> None:
    certificate = {"notAfter": "Dec 10 12:00:00 2026 GMT"}
    assert expiry(certificate, "TLSv1.3", NOON).verdict == "warn"
    early = expiry(certificate, "TLSv1.3", NOON - timedelta(days=30))
    assert (early.verdict, early.detail) == ("ok", "TLSv1.3, a trusted certificate until 2026-12-10")


@pytest.mark.parametrize(("ahead_seconds", "verdict"), [(0, "ok"), (30, "ok"), (31, "warn"), (-3600, "warn")])
def test_a_clock_is_compared_with_the_coordinator_s(ahead_seconds: int, verdict: str) -> None:
    found = clock(format_datetime(NOON, usegmt=True), NOON + timedelta(seconds=ahead_seconds))
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://c:8470/d", "https://c:8470/d"),
        ("https://[::1]:8470/d", "https://[::1]:8470/d"),
        ("https://a:b@c/d", "https://a:***@c/d"),
        ("postgresql://a:b@b/b@c/d", "postgresql://a:***@b/b@c/d"),
        ("postgresql://a:b/b@c/d", "postgresql://a:***@c/d"),
        (
            "postgresql://a:b@c/d?sslmode=require&password=b&sslpassword=b&sslkey=e.key",
            "postgresql://a:***@c/d?sslmode=require&password=***&sslpassword=***&sslkey=e.key",
        ),
    ],
)
def test_a_password_in_a_url_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_a_loopback_address_is_told_from_others() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.0.0.9", "::1", "10.0.0.1", "example.org")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_a_check_that_breaks_is_a_finding_and_not_the_end() -> None:
    def breaks() -> list[Finding]:
        raise OSError("no such device")

    found = list(examined([("gpu", breaks), ("next", lambda: [Finding("next", "ok", "well")])]))
    assert [(one.name, one.verdict) for one in found] == [("gpu", "fail"), ("next", "ok")]
    assert found[0].detail == "could not be looked at: OSError: no such device"


def test_little_shared_memory_for_loaders_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(loaders: int) -> list[Finding]:
        settings = {"url": "https://a.example", "token": "t", "name": "w", "state_dir": tmp_path, "device": "cpu"}
        given = WorkerSettings(**settings, datasets={"digits": {"kind": "digits"}}, loaders=loaders)
        return list(doctor_checks._shared_memory(given, cuda=False))

    monkeypatch.setattr(doctor_checks, "MIN_SHARED_BYTES", 1 << 62)
    assert found(0) == []
    (warning,) = found(3)
    assert "for the batches of 3 loaders" in warning.detail
    assert "--shm-size" in warning.remedy
    monkeypatch.setattr(doctor_checks, "MIN_SHARED_BYTES", 1)
    assert found(3) == []
