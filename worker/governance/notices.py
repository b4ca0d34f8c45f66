"""Notices to a site's people, by a webhook or a command, of runs to approve and updates to release.

Each channel has a thread, for which the worker never waits. The decisions named in its notices are stored, so that a
restart repeats no notice.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Self

import structlog
from pydantic import Field, model_validator

from tessera.shared.client.notice_channels import Channel, Undelivered, WebhookUrl, channels
from tessera.shared.schema import Value
from tessera.shared.tensors.lazy import digest_of
from tessera.worker.governance.airlock import Airlock
from tessera.worker.governance.approvals import Inbox
from tessera.worker.state.database import StateDatabase, StateError

EVERY_SECONDS = 15.0

PAUSE_SECONDS = 60.0
"""Time after a notice before the next one, which then names all new decisions: runs cost a coordinator nothing."""

RETRY_SECONDS = (120.0, 600.0, 1_800.0, 7_200.0)
"""Delays after failed attempts."""

MAX_NAMED = 5

log = structlog.get_logger("worker")


class NoticeSettings(Value):
    """Notices to the site's people of runs that wait for approval and updates that wait for release."""

    webhook: WebhookUrl | None = Field(default=None, description="https:// URL to which a notice is posted")
    webhook_secret_file: Path | None = Field(
        default=None, description="file with the key that signs these notices: whsec_ and base64; read at each notice"
    )
    command: tuple[str, ...] = Field(
        default=(), description="program and arguments, started for each notice, with the notice as JSON on its input"
    )

    @model_validator(mode="after")
    def _has_a_secret(self) -> Self:
        if (self.webhook is None) != (self.webhook_secret_file is None):
            raise ValueError("webhook and webhook_secret_file are given together: the receiver verifies each notice")
        return self

    @property
    def channels(self) -> list[Channel]:
        return channels(self.webhook, self.webhook_secret_file, self.command)


class Notices:
    """Notices by one channel. Without an answer it tries again, and gives up after three hours."""

    def __init__(self, channel: Channel, worker: str, inbox: Inbox, airlock: Airlock, folder: Path) -> None:
        self._channel = channel
        self._worker = worker
        self._inbox = inbox
        self._airlock = airlock
        self._database = StateDatabase.of(folder)
        self._note = f"notices-{channel.name}"
        self._attempts = 0
        self._due_at = 0.0
        self._ended = Event()

    def start(self) -> None:
        Thread(target=self._work, name="notices", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _work(self) -> None:
        said = ""
        while not self._ended.wait(EVERY_SECONDS):
            try:
                self.look(time.time())
            except (StateError, OSError) as fault:
                # Once, not at each look.
                if said != (said := str(fault)):
                    log.warning("notices-failed", channel=self._channel.name, detail=said)

    def look(self, now: float) -> None:
        """Send one notice of all new decisions, if one is due."""
        waiting = dict(self._waiting())
        before = set(json.loads(self._database.note(self._note) or "[]"))
        told = before & waiting.keys()
        new = sorted(waiting.keys() - told)
        if new and now >= self._due_at:
            if not self._sent(new, [waiting[key] for key in new], now):
                return
            told |= set(new)
        if told != before:
            self._database.set_note(self._note, json.dumps(sorted(told)))

    def _waiting(self) -> Iterator[tuple[str, str]]:
        """Yield a key and a description of each decision that waits for a person at this worker."""
        for request in self._inbox.requests():
            if request.decision is None and request.worker == self._worker:
                yield f"{request.run}.{request.terms}", f"approval of {request.run_name}"
        for held in self._airlock.held():
            if self._airlock.decision(held) is None:
                yield held.id, f"release of an update of {held.run_name}, round {held.round}"

    def _sent(self, keys: Sequence[str], words: Sequence[str], now: float) -> bool:
        """Return True if a notice was sent or given up, and False if it will be sent again."""
        more = f"; and {len(words) - MAX_NAMED} more" if len(words) > MAX_NAMED else ""
        notice = {
            # The same at each attempt, so that a receiver can ignore a repetition.
            "id": digest_of("\n".join(keys).encode())[-32:],
            "at": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
            "code": "site-decides",
            "title": f"Worker {self._worker} waits for: {'; '.join(words[:MAX_NAMED])}{more}",
        }
        about = {"channel": self._channel.name, "notice": notice["id"]}
        try:
            self._channel.send(notice, now)
        except Undelivered as fault:
            is_last = self._attempts == len(RETRY_SECONDS)
            log.warning("notice-given-up" if is_last else "notice-not-sent", **about, detail=str(fault))
            if not is_last:
                self._due_at = now + RETRY_SECONDS[self._attempts]
                self._attempts += 1
                return False
        else:
            log.info("notice-sent", **about)
        self._attempts, self._due_at = 0, now + PAUSE_SECONDS
        return True


TEST: Mapping[str, str] = {"id": "test", "code": "test", "title": "This is a test: notices of this worker arrive"}
