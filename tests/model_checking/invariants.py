"""What must hold after every step (I1 to I15 of the architecture), judged from the tables by other code than the
coordinator's: plain SQL, the lifecycles written out once more, and a merge of its own.

A step that commits nothing leaves the tables as they are, so it is looked at only whether any step did.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.engine import Database
from tessera.shared.methods.base import Plan
from tessera.shared.model.blocks import Block
from tessera.shared.problems import Problem
from tessera.shared.rounds.outliers import PREFIX
from tessera.shared.rounds.server_step import MEMORY
from tessera.shared.rounds.versions import States
from tessera.shared.tensors.lazy import from_bytes
from tests.model_checking.actors import MODEL, step_of
from tests.model_checking.replicas import World
from tests.model_checking.schedule import Fiber
from tests.support.histories import Finding, Log, check, misfit

LEGAL = {
    "run": {
        "pause": {"running": "paused"},
        "resume": {"paused": "running"},
        "cancel": {"running": "cancelled", "paused": "cancelled"},
        "complete": {"running": "completed"},
    },
    "round": {
        "close": {"open": "merging"},
        "commit": {"merging": "committed"},
        "abandon": {"open": "abandoned", "merging": "abandoned"},
    },
    "task": {
        "lease": {"offered": "leased"},
        "release": {"leased": "offered"},
        "expire": {"leased": "expired"},
        "offer": {"expired": "offered"},
        "accept": {"leased": "accepted"},
        "merge": {"accepted": "merged"},
        "leave_out": {"accepted": "left_out"},
        "reject": {"leased": "rejected"},
        "fail": {"leased": "failed"},
        "cancel": {"offered": "cancelled", "leased": "cancelled", "expired": "cancelled"},
    },
}
ACCEPTED = ("accepted", "merged", "left_out")
WAITS = ("train", "accepted", None)
"""Of an update that is in the buffer."""
OVER = (*ACCEPTED, "rejected", "failed", "cancelled")
TRAINED_LATER = {"layer.0.qkv.weight#value", "head.weight"}
"""What FedFrozen still trains, with the scope of these runs, once its warm-up is over."""
STANDSTILL_SECONDS = 600.0
"""Longest time without a version while enough sites live and none misbehaves: a deadline, a lease and its repetition,
and the waits between attempts at a round."""
FIRST = {"run.create": "running", "round.open": "open", "round.ask": "open", "task.evaluate": "offered"}

Rows = dict[str, sqlite3.Row]

LEASED = """SELECT tasks.id, lease_expires_at FROM tasks JOIN rounds ON rounds.id = round_id
    WHERE tasks.state = 'leased' AND rounds.state = 'open'"""
# A round that buffers updates waits until there are enough.
DUE = """SELECT rounds.id, deadline_at FROM rounds JOIN runs ON runs.id = run_id WHERE rounds.state = 'open'
    AND coalesce(json_extract(runs.spec, '$.cohort.mode'), 'barrier') = 'barrier'"""
LEFT_OVER = """SELECT rounds.id, runs.state FROM rounds JOIN runs ON runs.id = run_id
    WHERE rounds.state IN ('open', 'merging') AND runs.state IN ('cancelled', 'completed')
    AND updated_at < ?"""


class Violated(AssertionError):
    """An invariant does not hold. The text begins with its number."""


@dataclass
class Watch:
    """Looks at one federation's tables after each step."""

    world: World
    examples: Mapping[str, int]
    looks: int = 0
    changes: int = 0
    _version: int = -1
    _seq: int = 0
    _digest: str = "0" * 64
    _states: dict[str, str] = field(default_factory=dict)
    """Every run's, round's and task's state, by the audit alone."""
    _tokens: dict[str, int] = field(default_factory=dict)
    _tables: dict[str, Rows] = field(default_factory=dict)
    _blobs: set[str] = field(default_factory=set)
    promised: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    """What was told 'accepted': token and update, by task."""
    is_calm: bool = False
    longest_standstill: float = 0.0
    _moved: tuple[int, float] = (-1, 0.0)
    """The version of a run that buffers updates, and since when it could have made the next one."""

    def __post_init__(self) -> None:
        self._db = sqlite3.connect(self.world.folder / "tessera.db", isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._tables = self._read()
        # Eyes of its own: every coordinator may be down when it looks.
        folder = self.world.folder
        self._database = Database(f"sqlite:///{folder}/tessera.db", self.world.schedule.now)
        self._store = Blobs(self._database, str(folder / "blobs"), folder / "eyes", 8, 1 << 18)

    def close(self) -> None:
        self._db.close()
        self._database.close()

    def rows(self, table: str) -> Rows:
        return self._tables[table]

    # ------------------------------------------------------------ after every step

    def look(self, fiber: Fiber) -> None:
        self.looks += 1
        version = self._db.execute("PRAGMA data_version").fetchone()[0]
        if version == self._version:
            return
        self._version = version
        before, now = self._tables, self._read()
        changed = {name for name in now if now[name] != before[name]}
        fiber.wrote |= changed
        self._blobs_are_their_names(now)
        if not changed:
            return
        self.changes += 1
        new = self._audit(now, before)
        self._tables = now
        for table in ("runs", "rounds", "tasks"):
            for key, row in now[table].items():
                _hold(
                    self._states.get(key) == row["state"],
                    "I15",
                    f"{table[:-1]} {key} is {row['state']}, by the audit {self._states.get(key)}",
                )
        self._rounds(now, before)
        self._tasks(now, before)
        self._versions(now, before, new)
        for task, (token, update) in self.promised.items():
            self._kept(now, task, token, update)

    def _read(self) -> dict[str, Rows]:
        keys = {"runs": "id", "rounds": "id", "tasks": "id", "versions": "rowid", "workers": "id"}
        return {
            table: {str(row[0]): row for row in self._db.execute(f"SELECT {key}, * FROM {table}")}
            for table, key in keys.items()
        }

    def _audit(self, now: dict[str, Rows], before: dict[str, Rows]) -> list[str]:
        """Replays what is new of the chain; the actions."""
        actions = []
        for row in self._db.execute("SELECT * FROM audit WHERE seq > ? ORDER BY seq", (self._seq,)):
            entry = {name: row[name] for name in ("seq", "at", "actor", "action", "subject", "run_id")}
            entry["detail"] = json.loads(row["detail"])
            text = json.dumps([self._digest, entry], sort_keys=True, separators=(",", ":"))
            digest = hashlib.sha256(text.encode()).hexdigest()
            _hold((row["seq"], row["digest"]) == (self._seq + 1, digest), "I15", f"entry {row['seq']} is not chained")
            self._seq, self._digest = row["seq"], digest
            actions.append(row["action"])
            self._replay(row["action"], row["subject"], entry, now, before)
        return actions

    def _replay(
        self, action: str, subject: str, entry: dict[str, Any], now: dict[str, Rows], before: dict[str, Rows]
    ) -> None:
        kind, _, event = action.partition(".")
        if action in FIRST:
            self._first(action, subject, self._states.get(entry["run_id"]), now)
        elif action == "run.change":
            _hold(self._states[subject] in ("running", "paused"), "states", f"{action} of {subject}, which is over")
        elif kind in LEGAL:
            at = self._states.get(subject, "nowhere")
            _hold(at in LEGAL[kind][event], "states", f"{action} of {subject}, which was {at}")
            self._states[subject] = LEGAL[kind][event][at]
            self._receipts(action, entry, now)
        token = entry["detail"].get("token")
        if action == "task.lease":
            _hold(
                token == self._tokens[subject] + 1,
                "I4",
                f"lease of {subject} under token {token} after {self._tokens[subject]}",
            )
            self._tokens[subject] = token
        elif kind == "task" and event in LEGAL["task"]:
            _hold(
                token == self._tokens[subject],
                "I4",
                f"{action} of {subject} under token {token}, not {self._tokens[subject]}",
            )
        if action == "task.cancel":
            self._cancelled(subject, entry["run_id"], now, before)
        if action == "task.expire":
            expires_at = before["tasks"][subject]["lease_expires_at"]
            _hold(
                expires_at <= entry["at"] + 1e-5,
                "I12",
                f"task {subject} expired {expires_at - entry['at']:.3f} s too early",
            )

    def _cancelled(self, task: str, run_id: str, now: dict[str, Rows], before: dict[str, Rows]) -> None:
        """A run that buffers updates and goes on ends no work that a worker is at, unless it is too old."""
        run, row = now["runs"][run_id], now["tasks"][task]
        spec = json.loads(run["spec"])
        goes_on = self._states[run_id] in ("running", "paused") and run["version_number"] < spec["rounds"]
        is_work = row["kind"] == "train" and before["tasks"][task]["state"] == "leased"
        old = row["version_number"] < run["version_number"] + 1 - spec["cohort"].get("max_staleness", 10)
        withheld = json.loads(row["problem"] or "{}").get("code") == "withheld"
        ends = buffers(spec) and goes_on and is_work and not (old or withheld)
        _hold(not ends, "work", f"task {task} was cancelled at work")

    def _first(self, action: str, subject: str, run: str | None, now: dict[str, Rows]) -> None:
        """What begins: also the tasks of a round, which has no entry for each."""
        if action == "round.ask":
            _hold(self._states[subject] == "open", "states", f"round {subject} asks, and is not open")
        self._states[subject] = FIRST[action]
        if action not in ("round.open", "round.ask"):
            self._tokens[subject] = 0
            return
        _hold(run == "running", "states", f"{action} of a run that is {run}")
        for key, task in now["tasks"].items():
            if task["round_id"] == subject and key not in self._states:
                self._states[key], self._tokens[key] = "offered", 0
                made = max(v["number"] for v in now["versions"].values() if v["run_id"] == task["run_id"])
                starts = task["version_number"]
                _hold(starts == made, "base", f"task {key} starts from version {starts}; the latest is {made}")

    def _receipts(self, action: str, entry: dict[str, Any], now: dict[str, Rows]) -> None:
        """What the end of a round, or of a run, makes of accepted updates."""
        if action not in ("round.commit", "round.abandon", "run.complete", "run.cancel"):
            return
        ended = {key for key, row in now["rounds"].items() if row["state"] in ("open", "merging")}
        if action == "run.cancel" and any(now["rounds"][key]["run_id"] == entry["run_id"] for key in ended):
            # The round is abandoned after it.
            return
        number, left_out = entry["detail"].get("number"), entry["detail"].get("left_out", ())
        for key, task in now["tasks"].items():
            if task["kind"] != "train" or task["run_id"] != entry["run_id"] or self._states[key] != "accepted":
                continue
            if action != "round.commit":
                run = now["runs"][task["run_id"]]
                kept = buffers(json.loads(run["spec"])) and run["state"] in ("running", "paused")
                self._states[key] = "accepted" if kept else "left_out"
            elif task["merged_in"] == number:
                self._states[key] = "left_out" if key in left_out else "merged"
            elif number >= json.loads(now["runs"][task["run_id"]]["spec"])["rounds"]:
                self._states[key] = "left_out"

    def _rounds(self, now: dict[str, Rows], before: dict[str, Rows]) -> None:
        live: dict[str, str] = {}
        for key, row in now["rounds"].items():
            run = now["runs"][row["run_id"]]
            spec = json.loads(run["spec"])
            # A round goes on as it was opened, whatever becomes of the run's settings.
            opened = json.loads(row["opened_with"])
            agreed = {**spec, **opened, "cohort": {**spec["cohort"], **opened.get("cohort", {})}}
            tasks = [task for task in now["tasks"].values() if task["round_id"] == key]
            accepted = [task for task in tasks if task["state"] in ACCEPTED]
            if row["state"] in ("open", "merging"):
                _hold(
                    row["run_id"] not in live,
                    "one live round",
                    f"rounds {live.get(row['run_id'])} and {key} are both live",
                )
                _hold(
                    row["number"] == run["version_number"] + 1,
                    "I3",
                    f"round {row['number']} lives at version {run['version_number']}",
                )
                _hold(row["number"] <= agreed["rounds"], "I3", f"round {row['number']} is of {agreed['rounds']}")
                live[row["run_id"]] = key
            number = row["number"] if row["state"] in ("merging", "committed") else None
            first = row["number"] - 1 - agreed["cohort"].get("max_staleness", 10)
            if row["state"] != "open":
                # Of a run that was cancelled, the tasks end with the round that is live.
                others = (each for each in now["rounds"].values() if each["run_id"] == row["run_id"])
                lives = run["state"] in ("running", "paused") or any(
                    o["state"] in ("open", "merging") for o in others
                )
                goes_on = buffers(agreed) and lives
                open_ = [task for task in tasks if task["state"] in ("offered", "leased", "expired")]
                waiting = [task["state"] for task in open_ if not goes_on or task["version_number"] <= first]
                _hold(not waiting, "states", f"round {key} is {row['state']}, and has tasks that are {waiting}")
            if buffers(agreed):
                accepted = [
                    task
                    for task in now["tasks"].values()
                    if (task["run_id"], task["merged_in"]) == (row["run_id"], row["number"])
                ]
                counted = [task["worker_id"] for task in accepted]
                _hold(len(set(counted)) == len(counted), "I1", f"round {key} counts a worker twice")
                early = [task["version_number"] for task in accepted if task["version_number"] < first]
                _hold(not early, "staleness", f"round {key} takes updates of the versions {early}")
            else:
                if row["state"] in ("committed", "abandoned"):
                    waiting = [task["id"] for task in tasks if task["state"] == "accepted"]
                    _hold(not waiting, "receipts", f"round {key} is {row['state']}; tasks {waiting} are not told")
                # A round's end assigns what was accepted in it, and its abandonment takes that back.
                assigned = {task["merged_in"] for task in accepted}
                _hold(
                    assigned <= {number}, "I1", f"updates of round {key}, {row['state']}, are of versions {assigned}"
                )
            closed = ("merging", "committed")
            if row["state"] in closed and before["rounds"].get(key, row)["state"] not in closed:
                quorum = agreed["cohort"]["quorum"]
                left = [
                    t["id"] for t in now["tasks"].values() if (t["run_id"], *_place(t)) == (row["run_id"], *WAITS)
                ]
                _hold(not left, "lost", f"round {key} closed without the accepted updates {left}")
                _hold(
                    len(accepted) >= quorum,
                    "quorum",
                    f"round {key} is {row['state']} with {len(accepted)} of {quorum}",
                )
            workers = [task["worker_id"] for task in tasks]
            _hold(len(set(workers)) == len(workers), "I1", f"a worker has several tasks in round {key}")
            for task in (task for task in tasks if task["id"] not in before["tasks"]):
                silent = task["created_at"] - now["workers"][task["worker_id"]]["last_seen_at"]
                is_here = silent <= self.world.settings["liveness_seconds"]
                _hold(is_here, "presence", f"a worker was asked that was last heard of {silent:.0f} s ago")

    def _bases(self, now: dict[str, Rows]) -> None:
        retired = {(v["run_id"], v["number"]) for v in now["versions"].values() if v["retired_at"] is not None}
        for key, task in now["tasks"].items():
            counts = task["state"] in ("offered", "leased", "expired", "accepted") and task["kind"] == "train"
            gone = counts and (task["run_id"], task["version_number"]) in retired
            _hold(not gone, "base", f"version {task['version_number']} is removed, and task {key} starts from it")
        begun: dict[tuple[str, str], set[int]] = {}
        for task in now["tasks"].values():
            if task["kind"] == "train" and task["token"]:
                begun.setdefault((task["run_id"], task["worker_id"]), set()).add(task["version_number"])
        for (run, worker), bases in begun.items():
            most = json.loads(now["runs"][run]["spec"])["cohort"].get("max_updates_per_site")
            _hold(most is None or len(bases) <= most, "cap", f"{worker} began at {sorted(bases)}, of {most} allowed")

    def _tasks(self, now: dict[str, Rows], before: dict[str, Rows]) -> None:
        at_work = [
            (task["run_id"], task["worker_id"])
            for task in now["tasks"].values()
            if task["kind"] == "train"
            and (
                task["state"] in ("offered", "leased", "expired")
                or (task["state"] == "accepted" and task["merged_in"] is None)
            )
        ]
        _hold(len(set(at_work)) == len(at_work), "I1", "a worker has two tasks of a run that may still count")
        self._bases(now)
        for key, old in before["tasks"].items():
            new = now["tasks"][key]
            if new == old:
                continue
            if old["state"] in OVER:
                # How an update compares with the others of its round is noted when they are all there.
                if _unscored(new) == _unscored(old):
                    continue
                # What becomes of an accepted update, with the end of its round.
                became = {name: new[name] for name in ("state", "merged_in", "unmerged")}
                if _unscored(new) == {**_unscored(old), **became} and old["state"] == "accepted":
                    continue
                _hold(False, "states", f"task {key}, which was {old['state']}, changed")
            if new["state"] == "accepted" and new["round_id"]:
                round_ = before["rounds"][new["round_id"]]
                is_open = round_["state"] == "open" or buffers(json.loads(now["runs"][new["run_id"]]["spec"]))
                _hold(is_open, "I13", f"task {key} was accepted when its round was {round_['state']}")
                site = now["workers"][new["worker_id"]]["site_id"]
                _hold(new["examples"] <= self.examples[site], "I10", f"task {key} counts {new['examples']} examples")

    def _versions(self, now: dict[str, Rows], before: dict[str, Rows], new: list[str]) -> None:
        metrics: dict[str, list[int]] = {}
        for row in now["versions"].values():
            metrics.setdefault(row["run_id"], []).append(row["number"])
        for run, row in now["runs"].items():
            _hold(
                sorted(metrics[run]) == list(range(row["version_number"] + 1)),
                "I3",
                f"run {run} at {row['version_number']} has versions {metrics[run]}",
            )
            committed = sorted(
                r["number"] for r in now["rounds"].values() if r["run_id"] == run and r["state"] == "committed"
            )
            _hold(
                committed == list(range(1, row["version_number"] + 1)),
                "I3",
                f"run {run} at {row['version_number']} has committed rounds {committed}",
            )
        for key, old in before["versions"].items():
            same = now["versions"].get(key)
            _hold(same is not None and _unretired(same) == _unretired(old), "I2", f"version {old['number']} changed")
        for key, row in now["rounds"].items():
            if row["state"] == "committed" and before["rounds"][key]["state"] != "committed":
                self._merged(key, now)

    # ------------------------------------------------------------ what a version is made of

    def _merged(self, round_id: str, now: dict[str, Rows]) -> None:
        with self._database.snapshot() as session:
            detail = misfit(session, self._store, round_id)
        _hold(detail is None, "I6", str(detail))
        round_ = now["rounds"][round_id]
        of_version = (round_["run_id"], round_["number"], "merged")
        tasks = [t for t in now["tasks"].values() if (t["run_id"], t["merged_in"], t["state"]) == of_version]
        spec = json.loads(now["runs"][round_["run_id"]]["spec"])
        if spec["server_optimizer"]["kind"] != "none":
            return
        if spec["cohort"].get("memory"):
            self._remembered(round_["run_id"], round_["number"], now)
            return
        rests = buffers(spec)
        number, first = round_["number"], min((task["version_number"] for task in tasks), default=0)
        names = {n: self._manifest(round_["run_id"], n, now) for n in range(min(first, number - 1), number + 1)}
        for block in MODEL.blocks:
            mean, weight = np.zeros(block.shape), 0.0
            digests = {n: blocks[block.name] for n, blocks in names.items()}
            for task in () if self._is_frozen(block.name, number, now["runs"][round_["run_id"]]) else tasks:
                sent = Plan.model_validate_json(task["plan"]).upload.resolve(MODEL.blocks)
                if block not in sent:
                    continue
                since = range(task["version_number"] + 1, number)
                late = sqrt(1 + sum(digests[n] != digests[n - 1] for n in since))
                step = step_of(task["seed"] + [*sent].index(block), block.shape, rests=rests)
                mean += task["examples"] / late * step
                weight += task["examples"]
            old, new = (from_bytes(self._store.read(digests[n]), block.dtype) for n in (number - 1, number))
            moved = (new - old.astype(float)).reshape(block.shape)
            _hold(bool(np.isfinite(moved).all()), "I10", f"version {number} is not finite")
            close = np.allclose(moved, mean / (weight or 1.0), atol=1e-5) and (weight > 0 or not moved.any())
            _hold(close, "I1", f"{block.name} of version {number} is not the mean of what was accepted")

    def _is_frozen(self, block: str, number: int, run: sqlite3.Row) -> bool:
        method = json.loads(run["spec"])["method"]
        return number > method["settings"].get("warmup_rounds", number) and block not in TRAINED_LATER

    def _remembered(self, run: str, number: int, now: dict[str, Rows]) -> None:
        """The version's memory is the mean of each site's latest step, and its step the calibrated one."""
        before: dict[str, sqlite3.Row] = {}
        sent: dict[str, sqlite3.Row] = {}
        merged = [t for t in now["tasks"].values() if (t["run_id"], t["state"]) == (run, "merged")]
        for task in sorted(merged, key=lambda task: task["merged_in"]):
            site = now["workers"][task["worker_id"]]["site_id"]
            if task["merged_in"] <= number:
                (sent if task["merged_in"] == number else before)[site] = task
        latest = before | sent
        total, share = (float(sum(task["examples"] for task in each.values())) for each in (latest, sent))
        row = next(v for v in now["versions"].values() if (v["run_id"], v["number"]) == (run, number))
        memory = States(self._store).manifest(row["digest"]).server_state
        old, new = (self._manifest(run, n, now) for n in (number - 1, number))
        for place, block in enumerate(MODEL.blocks):

            def summed(tasks: dict[str, sqlite3.Row], place: int = place, block: Block = block) -> np.ndarray:
                drawn = ((task["examples"], task["seed"] + place) for task in tasks.values())
                steps = (examples * step_of(seed, block.shape, rests=True) for examples, seed in drawn)
                return sum(steps, np.zeros(block.shape)) / total

            mean = summed(latest)
            step = mean - (1 - share / total) * summed(before)
            entry = memory[MEMORY + block.name]
            kept = from_bytes(self._store.read(entry.digest), entry.dtype).reshape(block.shape)
            close = np.allclose(kept, mean, atol=1e-5)
            _hold(close, "memory", f"{block.name} of version {number} is not the mean of the sites' latest")
            start, found = (from_bytes(self._store.read(of[block.name]), block.dtype) for of in (old, new))
            moved = (found - start.astype(float)).reshape(block.shape)
            _hold(np.allclose(moved, step, atol=1e-5), "memory", f"version {number} makes another step")

    def _manifest(self, run: str, number: int, now: dict[str, Rows]) -> Mapping[str, str]:
        row = next(v for v in now["versions"].values() if (v["run_id"], v["number"]) == (run, number))
        return States(self._store).manifest(row["digest"]).blocks

    # ------------------------------------------------------------ blobs

    def _blobs_are_their_names(self, now: dict[str, Rows], *, again: bool = False) -> None:
        if again:
            self._blobs.clear()
        for row in self._db.execute("SELECT digest, size, inline FROM blobs"):
            digest = row["digest"]
            if digest in self._blobs:
                continue
            data = row["inline"]
            if data is None:
                path = self.world.folder / "blobs" / digest[7:9] / digest[7:]
                _hold(path.exists(), "I5", f"blob {digest} is in the table and not on the disk")
                data = path.read_bytes()
            found = f"sha256:{hashlib.sha256(data).hexdigest()}"
            _hold((found, len(data)) == (digest, row["size"]), "I2", f"blob {digest} holds other bytes")
            self._blobs.add(digest)

    def findings(self, log: Log) -> list[Finding]:
        kept = all(row["retired_at"] is None for row in self._tables["versions"].values())
        return check(log.lines, self._database, self._store, merges_again=kept)

    def after_start(self, power_cut: bool) -> None:
        """Nothing that was entered is gone."""
        self._blobs_are_their_names(self._tables, again=power_cut)

    # ------------------------------------------------------------ answers

    def after_request(self, label: str, problem: Problem | None, wrote: set[str]) -> None:
        """A refused action leaves the tables as they were; only a bad update is noted as such."""
        if problem and problem.code != "invalid-update":
            touched = wrote & {"runs", "rounds", "tasks", "versions"}
            _hold(not touched, "refusals", f"{label} was refused ({problem.code}) and changed {sorted(touched)}")

    def after_report(
        self,
        task: str,
        token: int,
        update: str | None,
        problem: Problem | None,
        *,
        garbled: bool = False,
        held: bool = False,
    ) -> None:
        """An accepted report is there from now on, and what repeats it gets the same answer.

        A copy whose bytes were garbled repeats nothing that was accepted.
        """
        if problem:
            refused = (
                held and self.holds(task, token) and problem.code in ("lease-lost", "round-closed", "task-cancelled")
            )
            _hold(not refused, "work", f"a report on {task} was refused, and its lease holds: {problem.code}")
            same = self.promised.get(task) == (token, update) and not garbled
            _hold(not same, "I13", f"a repeated report on {task} was refused: {problem.code}")
            return
        before = self.promised.setdefault(task, (token, update))
        _hold(
            before == (token, update),
            "I1",
            f"task {task} was accepted for two reports: {before} and {(token, update)}",
        )
        self._kept(self._tables, task, token, update)

    def holds(self, task: str, token: int) -> bool:
        """Whether a token holds a task."""
        row = self._tables["tasks"].get(task)
        return row is not None and (row["state"], row["token"]) == ("leased", token)

    def is_over(self, task: str) -> bool:
        """Whether nothing more may become of a task's work."""
        return task in self._tables["tasks"] and self._tables["tasks"][task]["state"] in OVER

    def after_heartbeat(self, task: str, over: bool) -> None:
        """A worker learns at its next heartbeat that its task is over."""
        _hold(not over, "told", f"a heartbeat was answered for task {task}, which had ended")

    def _kept(self, now: dict[str, Rows], task: str, token: int, update: str | None) -> None:
        row = now["tasks"][task]
        found = (row["state"], row["token"], row["update_digest"])
        kept = row["state"] in ACCEPTED and found[1:] == (token, update)
        _hold(kept, "I5", f"the report on {task} was accepted, and is {found}")

    # ------------------------------------------------------------ in time

    def after_step(self, began_at: float) -> None:
        """A look of the conductor that began at a time has dealt with all that was due then (I14)."""
        for row in self._db.execute(LEASED):
            late = began_at - row["lease_expires_at"]
            _hold(late < 0, "I14", f"the lease of {row['id']} ran out {late:.1f} s before a look, and lasts")
        for row in self._db.execute(DUE):
            late = began_at - row["deadline_at"]
            _hold(
                late < 0, "I14", f"the deadline of round {row['id']} was {late:.1f} s before a look, and it is open"
            )
        for row in self._db.execute(LEFT_OVER, (began_at,)):
            _hold(False, "I14", f"round {row['id']} lives, and its run is {row['state']}")
        self._stands_still()

    def _stands_still(self) -> None:
        """A run that buffers updates makes a version in time, once nothing goes wrong and enough sites live."""
        for run in self._tables["runs"].values():
            at, number = self.world.schedule.at, run["version_number"]
            spec = json.loads(run["spec"])
            due = self.is_calm and buffers(spec) and run["state"] == "running" and number < spec["rounds"]
            if not due or self._moved[0] != number:
                self._moved = number, at
            stood = at - self._moved[1]
            self.longest_standstill = max(self.longest_standstill, stood)
            _hold(
                stood < STANDSTILL_SECONDS, "buffer", f"version {number} is {stood:.0f} s old, and no other follows"
            )


def buffers(spec: Mapping[str, Any]) -> bool:
    return bool(spec["cohort"].get("mode") == "buffer")


def _place(task: sqlite3.Row) -> tuple[str, str, int | None]:
    return task["kind"], task["state"], task["merged_in"]


def _unretired(version: sqlite3.Row) -> dict[str, Any]:
    return {name: value for name, value in dict(version).items() if name != "retired_at"}


def _unscored(task: sqlite3.Row) -> dict[str, Any]:
    metrics = json.loads(task["metrics"])
    return {**dict(task), "metrics": {name: value for name, value in metrics.items() if not name.startswith(PREFIX)}}


def _hold(holds: bool, invariant: str, otherwise: str) -> None:
    if not holds:
        raise Violated(f"{invariant}: {otherwise}")
