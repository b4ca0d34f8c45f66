"""Nobody who writes to a worker's folders, or restores an old copy of them, gives a budget back unnoticed."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner

from tessera.shared.api.runs import Training
from tessera.shared.api.tasks import Receipt, TaskView
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.run_settings import Budget, Privacy, rho_of
from tessera.worker.agent import Agent
from tessera.worker.bootstrap import runner_of
from tessera.worker.cli.site import site_of
from tessera.worker.cli.worker import app
from tessera.worker.faults.rolled_back import _charge
from tessera.worker.governance.policy import Allowance, PolicyViolation
from tessera.worker.settings import SettingsError, WorkerSettings
from tessera.worker.state.audit import LEDGER_HEAD, ROLLED_BACK, Audit, StateRolledBack
from tessera.worker.state.database import StateDatabase
from tessera.worker.state.hash_chain import BEGINNING, ChainError, Head, TaskRef
from tessera.worker.state.privacy_ledger import Event, ExactUse, Ledger, LedgerError, NoisyFigures, NoisySteps
from tessera.worker.stores import audit_key_of, audit_of, ledger_of
from tessera.worker.task.environment import Journal, TaskRun
from tessera.worker.task.fetch import _require_merged
from tessera.worker.training.progress import Report
from tests.support.chain_rows import ChainRows
from tests.support.coordinator import LiveCoordinator, until
from tests.support.datafiles import eighth_of_digits
from tests.support.in_process import in_process
from tests.support.task_document import task_of
from tests.worker.state.test_privacy_ledger import STEPS, TARGET
from tests.worker.task.test_hostile_coordinator import Hasty
from tests.worker.test_agent import begin, nowhere, settings_of

KEY = b"k" * 64
Line = dict[str, Any]


def file_of(folder: Path, dataset: str = "wards") -> ChainRows:
    return ChainRows(folder, f"ledger {dataset}")


def spend(ledger: Ledger, count: int = 1, budget: Budget = TARGET) -> None:
    for _ in range(count):
        with ledger.page("wards") as page:
            page.spend(TaskRef.of(task_of()), 100, budget, [STEPS])


def lines_of(path: ChainRows) -> list[Line]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def chained(entries: list[Line], digest: Callable[[bytes], str]) -> bytes:
    """The file that somebody without the key can make of entries: numbered, chained, and each with a digest."""
    previous, made = BEGINNING, b""
    for number, given in enumerate(entries):
        entry = {**given, "seq": number, "previous": previous}
        previous = digest(_canonical(entry))
        made += _canonical({"entry": entry, "digest": previous}) + b"\n"
    return made


def _canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def quieter(entry: Line) -> Line:
    return {**entry, "events": [{**event, "noise_multiplier": 50.0} for event in entry["events"]]}


def test_a_ledger_rewritten_with_more_noise_and_fitting_digests_is_refused(tmp_path: Path) -> None:
    spend(Ledger(tmp_path, KEY), 3)
    entries = [quieter(line["entry"]) for line in lines_of(file_of(tmp_path))]
    file_of(tmp_path).write_bytes(chained(entries, sha256))
    with pytest.raises(LedgerError, match="entry 1: this was changed"), Ledger(tmp_path, KEY).page("wards"):
        pass
    with pytest.raises(LedgerError):
        Ledger(tmp_path, KEY).read("wards")


def test_an_entry_put_behind_those_under_the_key_is_refused(tmp_path: Path) -> None:
    spend(Ledger(tmp_path, KEY), 2)
    path = file_of(tmp_path)
    last = lines_of(path)[-1]
    forged = {**last["entry"], "seq": 2, "previous": last["digest"], "voids": [0, 1], "events": []}
    path.write_bytes(path.read_bytes() + _canonical({"entry": forged, "digest": sha256(_canonical(forged))}) + b"\n")
    with pytest.raises(LedgerError, match="entry 3"):
        Ledger(tmp_path, KEY).read("wards")
    # Nor may it adopt what is before it: that takes the key too.
    forged["adopts"] = sha256(b"".join(path.lines()[:2]))
    body = b"".join(path.lines()[:2])
    path.write_bytes(body + _canonical({"entry": forged, "digest": sha256(_canonical(forged))}) + b"\n")
    with pytest.raises(LedgerError, match="entry 3"):
        Ledger(tmp_path, KEY).read("wards")


def witnessed(folder: Path) -> Head:
    """A ledger with three entries, of which the site's audit knows."""
    ledger = Ledger(folder, KEY)
    spend(ledger, 3)
    head = ledger.leaving("wards")
    assert head
    assert head.entries == 3
    return head


@pytest.mark.parametrize(
    "rolled_back",
    [
        lambda path: path.write_bytes(b"".join(path.lines()[:2])),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
    ],
    ids=["cut to two entries", "emptied", "deleted"],
)
def test_a_ledger_that_is_behind_what_the_audit_knows_is_refused_with_the_remedy(
    tmp_path: Path, rolled_back: Callable[[ChainRows], object]
) -> None:
    head = witnessed(tmp_path)
    rolled_back(file_of(tmp_path))
    ledger = Ledger(tmp_path, KEY)
    ledger.expect({"wards": head})
    with pytest.raises(LedgerError, match="Put back the newest copy"), ledger.page("wards"):
        pass
    with pytest.raises(LedgerError, match="not those 3"):
        ledger.read("wards")


def test_a_shared_ledger_has_what_each_of_its_data_sets_spent(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, KEY, {"wards": "people", "clinics": "people"})
    spend(ledger)
    ledger.leaving("wards")
    older = file_of(tmp_path, "people").read_bytes()
    with ledger.page("clinics") as page:
        page.spend(TaskRef.of(task_of()), 100, TARGET, [STEPS])
    ledger.leaving("clinics")
    assert len(ledger.read("wards")) == 2
    file_of(tmp_path, "people").write_bytes(older)
    for dataset in ("wards", "clinics"):
        with pytest.raises(LedgerError, match="has 1 entries, and not those 2"):
            ledger.read(dataset)
    for dataset in ("wards", "clinics"):
        ledger.adopt(dataset)
    assert [entry.events for entry in ledger.read("wards")] == [(STEPS,), (ExactUse(use="lost"),)]


def test_a_lost_ledger_of_a_removed_data_set_stops_all_others_until_it_is_adopted(tmp_path: Path) -> None:
    head = witnessed(tmp_path)
    ledger = Ledger(tmp_path, KEY)
    ledger.expect({"wards": head})
    assert len(ledger.elsewhere("clinics")) == 3
    file_of(tmp_path).unlink()
    with pytest.raises(LedgerError, match="Put back the newest copy"):
        ledger.elsewhere("clinics")
    (lost,) = ledger.lost(["clinics"])
    ledger.adopt(lost)
    assert [entry.events for entry in ledger.elsewhere("clinics")] == [(ExactUse(use="lost"),)]


def test_a_removed_data_set_s_ledger_may_have_another_name(tmp_path: Path) -> None:
    before = Ledger(tmp_path, KEY, {"wards": "people"})
    spend(before, 2)
    head = before.leaving("wards")
    assert head
    ledger = Ledger(tmp_path, KEY)
    ledger.expect({"wards": head})
    assert ledger.lost([]) == []
    assert len(ledger.elsewhere("clinics")) == 2
    people = file_of(tmp_path, "people")
    people.write_bytes(people.lines()[0])
    with pytest.raises(LedgerError, match="not those 2"):
        ledger.elsewhere("clinics")


def test_a_worker_does_not_start_without_the_ledger_of_a_removed_data_set(tmp_path: Path) -> None:
    here = settings(tmp_path)
    ledger = ledger_of(here)
    with ledger.page("clinics") as page:
        page.spend(TaskRef.of(task_of()), 100, TARGET, [STEPS])
    head = ledger.leaving("clinics")
    assert head
    audit_of(here).record("update.leave", None, **{LEDGER_HEAD: {"clinics": head.model_dump()}})
    runner_of(cast("Client", None), here, in_process(here))
    file_of(here.state_dir, "clinics").unlink()
    with pytest.raises(SettingsError, match="has 0 entries, and not those 1"):
        runner_of(cast("Client", None), here, in_process(here))
    config = tmp_path / "worker.toml"
    config.write_text(
        f'url = "{here.url}"\ntoken = "t"\nname = "w"\nstate_dir = "{here.state_dir}"\n'
        '[datasets.wards]\nkind = "digits"\n'
    )
    assert "has 0 entries" in site_of(config).ledger_faults(audit_of(here).read())[0]
    adopted = CliRunner().invoke(app, ["adopt", "--config", str(config), "--json"])
    assert json.loads(adopted.stdout) == {"audit": False, "ledgers": ["clinics"], "charged": {}}
    runner_of(cast("Client", None), here, in_process(here))


@pytest.mark.parametrize("shared", [False, True])
def test_a_renamed_worker_needs_the_ledgers_that_its_audit_knows_unless_other_workers_share_it(
    tmp_path: Path, shared: bool
) -> None:
    more = {"audit_dir": tmp_path / "audit", "audit_key": "ab" * 32} if shared else {}
    before = settings(tmp_path, **more)
    ledger = ledger_of(before)
    spend(ledger)
    head = ledger.leaving("wards")
    assert head
    audit_of(before).record("update.leave", None, **{LEDGER_HEAD: {"wards": head.model_dump()}})
    renamed = settings(tmp_path, name="v", **more)
    runner_of(cast("Client", None), renamed, in_process(renamed))
    file_of(renamed.state_dir).unlink()
    if shared:
        # It may as well be a new worker with a ledger of its own.
        runner_of(cast("Client", None), renamed, in_process(renamed))
        return
    with pytest.raises(SettingsError, match="has 0 entries, and not those 1"):
        runner_of(cast("Client", None), renamed, in_process(renamed))


def test_another_branch_of_the_same_length_is_no_substitute(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, KEY)
    head = witnessed(tmp_path / "b")
    spend(ledger, 3)
    ledger.expect({"wards": head})
    with pytest.raises(LedgerError, match="an older copy"):
        ledger.read("wards")


def test_one_data_set_s_ledger_is_not_taken_for_another_s(tmp_path: Path) -> None:
    spend(Ledger(tmp_path, KEY))
    file_of(tmp_path).rename(file_of(tmp_path, "clinics"))
    with pytest.raises(LedgerError):
        Ledger(tmp_path, KEY).read("clinics")


# ---------------------------------------------------------------- after the key is lost


def test_what_was_adopted_cannot_be_changed_afterwards(tmp_path: Path) -> None:
    spend(Ledger(tmp_path, b"o" * 64))
    Ledger(tmp_path, KEY).adopt("wards")
    spend(Ledger(tmp_path, KEY))
    old, *rest = lines_of(file_of(tmp_path))
    forged = quieter(old["entry"])
    changed = [{"entry": forged, "digest": sha256(_canonical(forged))}, *rest]
    file_of(tmp_path).write_bytes(b"".join(_canonical(line) + b"\n" for line in changed))
    with pytest.raises(LedgerError):
        Ledger(tmp_path, KEY).read("wards")


def test_after_the_key_was_lost_what_was_spent_counts_as_unbounded(tmp_path: Path) -> None:
    spend(Ledger(tmp_path, KEY), 2)
    other = Ledger(tmp_path, b"o" * 64)
    with pytest.raises(LedgerError, match="Put the key back"):
        other.read("wards")
    assert other.adopt("wards")
    spend(other)
    events = [event for entry in Ledger(tmp_path, b"o" * 64).read("wards") for event in entry.events]
    assert events == [STEPS, STEPS, ExactUse(use="lost"), STEPS]


def test_a_ledger_that_is_gone_can_be_adopted_as_lost(tmp_path: Path) -> None:
    head = witnessed(tmp_path)
    file_of(tmp_path).unlink()
    ledger = Ledger(tmp_path, KEY)
    ledger.expect({"wards": head})
    assert ledger.adopt("wards") == Head(entries=1, digest=lines_of(file_of(tmp_path))[0]["digest"])
    assert [entry.events for entry in ledger.read("wards")] == [(ExactUse(use="lost"),)]


def test_an_audit_is_under_the_key_too(tmp_path: Path) -> None:
    for number in range(3):
        Audit(tmp_path, "w", KEY).record("task.fail", None, number=number)
    path = ChainRows(tmp_path, "audit")
    entries = [{**line["entry"], "detail": {}} for line in lines_of(path)]
    path.write_bytes(chained(entries, sha256))
    with pytest.raises(ChainError):
        Audit(tmp_path, "w", KEY).read()
    with pytest.raises(ChainError, match="last entry was changed"):
        Audit(tmp_path, "w", KEY).record("worker.stop")


# ---------------------------------------------------------------- the key


def settings(folder: Path, **more: Any) -> WorkerSettings:
    given: dict[str, Any] = {"url": "http://127.0.0.1:9", "token": "t", "name": "w", "state_dir": folder / "state"}
    return WorkerSettings(datasets={"wards": {"kind": "digits"}}, **{**given, **more})


def test_a_key_is_made_once_outside_of_what_it_protects_for_its_owner_alone(tmp_path: Path) -> None:
    key = audit_key_of(settings(tmp_path))
    (made,) = tmp_path.iterdir()
    assert (made.name, made.stat().st_mode & 0o777) == ("state.key", 0o600)
    assert len(key) == 32
    assert audit_key_of(settings(tmp_path)) == key
    assert audit_key_of(settings(tmp_path, audit_key="ab" * 32)) == b"\xab" * 32


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"audit_key_file": "{}/state/key"}, "is in a folder that the key protects"),
        ({"audit_key_file": "{}/audit/key", "audit_dir": "{}/audit"}, "is in a folder that the key protects"),
        ({"audit_key": "short"}, "is not 64 hexadecimal digits"),
        ({"audit_key_file": "{}/file/key"}, "can be neither read nor created"),
        ({"state_dir": "/"}, "name a folder of the worker's own"),
        ({"ledger_dir": "{}/shared"}, "ledger_dir: is outside state_dir, .* audit_key_file, such as"),
        ({"audit_dir": "{}/shared"}, "audit_dir: is outside state_dir, .* TESSERA_WORKER_AUDIT_KEY"),
    ],
)
def test_a_key_that_would_protect_nothing_is_refused(tmp_path: Path, given: dict[str, str], said: str) -> None:
    (tmp_path / "file").touch()
    filled = {name: value.format(tmp_path) for name, value in given.items()}
    with pytest.raises(SettingsError, match=said):
        audit_key_of(settings(tmp_path, **filled))


def test_workers_that_share_ledgers_name_one_key(tmp_path: Path) -> None:
    for name in ("a", "b"):
        given = {"state_dir": tmp_path / name, "ledger_dir": tmp_path / "shared", "audit_key_file": tmp_path / "key"}
        spend(ledger_of(settings(tmp_path, **given)))
    # What lies within state_dir is this worker's alone, and needs no key to be named.
    audit_key_of(settings(tmp_path, ledger_dir=tmp_path / "state" / "other"))


def test_the_key_of_a_state_folder_given_as_a_dot_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir()
    monkeypatch.chdir(tmp_path / "state")
    audit_key_of(settings(tmp_path, state_dir="."))
    assert (tmp_path / "state.key").is_file()


def test_a_digest_under_the_key_tells_nothing_of_the_entry(tmp_path: Path) -> None:
    # Whoever guesses an entry in full cannot confirm it by the digest that a submission has.
    ledger = Ledger(tmp_path, KEY)
    spend(ledger)
    (line,) = lines_of(file_of(tmp_path))
    assert line["digest"] != sha256(_canonical(line["entry"]))
    other = Ledger(tmp_path / "b", b"o" * 64)
    with other.page("wards") as page:
        page.spend(
            TaskRef.of(task_of()), 100, TARGET, [NoisySteps(noise_multiplier=1.5, sampling_rate=0.1, steps=10)]
        )
    assert lines_of(file_of(tmp_path / "b"))[0]["digest"] != line["digest"]


@pytest.mark.parametrize(
    "spec", [{"privacy": Privacy(epsilon=8.0, delta=1e-5, clip_norm=1.0)}, {"method": MethodSpec(name="ditto")}]
)
def test_a_state_folder_that_was_put_back_stops_its_worker_until_a_person_adopts_it(
    coordinator: LiveCoordinator, tmp_path: Path, spec: dict[str, Any]
) -> None:
    client = coordinator.client()
    run = begin(client, rounds=4, training=Training(batch_size=32), **spec)
    settings = settings_of(coordinator, tmp_path, datasets={"digits": eighth_of_digits(tmp_path)})
    state, copy = settings.state_dir, tmp_path / "copy"

    def round_(agent: Agent) -> TaskView:
        task = until(agent._next)
        agent._run_task(task)
        return client.task(task.id)

    agent = Agent(settings, Hasty())
    assert round_(agent).is_accepted
    agent.close()
    shutil.copytree(state, copy)
    agent = Agent(settings, Hasty())
    lost = round_(agent)
    agent.close()
    shutil.rmtree(state)
    copy.rename(state)

    agent = Agent(settings, Hasty())
    given_back = round_(agent)
    assert agent._next() is None
    agent.close()
    # Also after a restart.
    assert StateDatabase.of(state).note(ROLLED_BACK)
    assert (given_back.state, given_back.attempts) == ("offered", 0)
    assert given_back.problem
    assert given_back.problem.detail.startswith("state-rolled-back: the coordinator accepted")
    assert len(ledger_of(settings).read("digits")) == 1

    file = tmp_path / "worker.toml"
    file.write_text(
        f'url = "{coordinator.url}"\ntoken = "{coordinator.token("site", "a")}"\nname = "w"\n'
        f'state_dir = "{state}"\n[datasets.digits]\nkind = "digits"\n'
    )
    adopted = CliRunner().invoke(app, ["adopt", "--config", str(file), "--json"])
    assert adopted.exit_code == 0, adopted.output
    assert json.loads(adopted.stdout)["charged"] == {"digits": 1}
    if "privacy" in spec:
        # An exact use counts once.
        first, second = ledger_of(settings).read("digits")
        assert (second.task, second.events, second.target) == (lost.id, first.events, first.target)
    agent = Agent(settings, Hasty())
    assert round_(agent).is_accepted
    agent.close()
    assert client.run(run.id).state == "running"


def test_a_new_state_folder_stops_only_a_worker_whose_data_have_a_budget(tmp_path: Path) -> None:
    settings = nowhere("http://127.0.0.1:1", tmp_path)
    agent = Agent(settings, Hasty())
    limited = replace(agent._runner, allowances={"digits": Allowance(epsilon=1.0, delta=1e-5)})
    held, older = "a" * 64, "b" * 64
    with pytest.raises(StateRolledBack):
        limited._require_state(held)
    agent._runner._require_state(held)
    # What the coordinator holds of this folder is known without its having read the chain to the end.
    head = agent._runner.audit.record("update.leave").digest
    limited._require_state(head)
    # An update that left, and that nobody accepted, makes the new folder no older copy.
    agent._runner._require_state(held)
    with pytest.raises(StateRolledBack):
        agent._runner._require_state(older)
    agent.close()


def test_a_lost_task_is_charged_like_one_of_its_kind(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    run = begin(coordinator.client(), rounds=4, privacy=Privacy(epsilon=8.0, delta=1e-5, clip_norm=1.0))
    steps, figures = NoisySteps(noise_multiplier=1.5, sampling_rate=0.1, steps=10), NoisyFigures(rho=0.1)
    noise, view = Budget(epsilon=1.0, delta=1e-5), TaskView.model_construct(run=run.id, examples=9)

    def charged(before: Sequence[Event], kind: str, rule: Budget | None) -> tuple[Event, ...]:
        ledger = Ledger(Path(tempfile.mkdtemp(dir=tmp_path)), KEY)
        with ledger.page("digits") as page:
            for number, event in enumerate(before):
                page.spend(TaskRef(run.id, "r", 1, f"{number}", 1), 100, TARGET, [event])
            _charge(page, run, view.model_copy(update={"kind": kind}), TaskRef(run.id, "r", 2, "lost", 1), rule)
        return ledger.read("digits")[-1].events

    # The last entry of a round is an evaluation's.
    assert charged([steps, figures], "train", noise) == (steps,)
    assert charged([steps, figures], "evaluate", None) == (figures,)
    assert charged([steps], "evaluate", noise) == (NoisyFigures(rho=rho_of(noise)),) * 2
    assert charged([steps], "evaluate", None) == (ExactUse(use="evaluation"),)
    assert charged([figures], "train", noise) == (ExactUse(use="lost"),)


def test_tensors_newer_than_a_restored_coordinator_stop_their_run_and_no_other(tmp_path: Path) -> None:
    agent = Agent(nowhere("http://127.0.0.1:1", tmp_path), Hasty())
    runner = agent._runner

    def trains_after(merged: str) -> None:
        task = task_of(id="t6", receipt=Receipt(task=merged, token=1, state="merged"))
        journal = Journal(TaskRef.of(task), "wards", None, None)
        _require_merged(TaskRun(runner, task, lambda: None, Report(), journal))

    assert runner.audit
    for name in ("t4", "t5"):
        runner.audit.record("update.leave", TaskRef.of(task_of(id=name)))
        runner.vault.stage("r", name, 1, {"own/a": np.zeros(2)}).commit()
    trains_after("t5")
    with pytest.raises(PolicyViolation, match=r"newer than its last merged update.*worker adopt --run r"):
        trains_after("t4")
    # Of a task that left later, or that the audit does not know, they are an older copy.
    runner.audit.record("update.leave", TaskRef.of(task_of(id="t7")))
    for later in ("t7", "t8"):
        with pytest.raises(StateRolledBack):
            trains_after(later)
    # Which a person adopts.
    runner.vault.adopt("r", None)
    trains_after("t4")
    agent.close()
