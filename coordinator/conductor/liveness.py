"""The live workers, and what stops an action of the conductor."""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.snapshots import candidates, live_workers, paces, remembering
from tessera.coordinator.domain.eligibility import RunTerms
from tessera.coordinator.domain.workers import LiveWorker, with_steps
from tessera.shared.problems import Conflict


class TooFewWilling(Conflict):
    """A round cannot open or go on because too few sites would do its tasks; `asked` are workers with a new task,
    after which it may."""

    def __init__(self, detail: str, asked: Sequence[str] = ()) -> None:
        super().__init__(detail)
        self.asked = asked


class Liveness:
    """The live workers: those that sent a request recently."""

    def __init__(self, database: Database, liveness_seconds: float) -> None:
        self._database = database
        self._liveness_seconds = liveness_seconds
        self._waits_since = self._looked_at = database.now()

    def looked(self, live: Sequence[LiveWorker]) -> None:
        """Note a look of the conductor that found these live workers. After a pause between two looks, and while none
        is live, give all workers the time to call again.

        While the database was away or the machine was suspended, every worker's last call grew old. That none calls
        is more likely a fault on the way to all of them than of each.
        """
        now = self._database.now()
        if not live or not 0 <= now - self._looked_at <= self._liveness_seconds / 2:
            self._waits_since = now
        self._looked_at = now

    def workers(self, session: Session) -> list[LiveWorker]:
        return live_workers(session, self._database.now() - self._liveness_seconds)

    def willing(self, run_id: str, invited: RunTerms) -> list[LiveWorker]:
        """Return the live workers that could take part in a round, with the facts that decide among a site's."""
        with self._database.snapshot() as session:
            found, spec = (
                remembering(session, run_id, candidates(session, invited, self.workers(session))),
                invited.spec,
            )
            if spec.cohort.work == "fixed":
                return found
            # How long private training takes may follow from the examples.
            return with_steps(spec, found, {} if spec.privacy else paces(session, run_id, spec.training, found))

    def is_settled(self) -> bool:
        """Return True if every live worker has had the time to call: nothing has kept them from it for that long."""
        return self._database.now() - self._waits_since > self._liveness_seconds


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Conflict(otherwise)
