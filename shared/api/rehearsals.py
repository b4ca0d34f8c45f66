"""A site's report on the rehearsal of a run: two steps of its training. Nothing else leaves."""

from typing import Annotated

from pydantic import Field

from tessera.shared.schema import Counted, Message

STEPS = 2
"""Steps of each phase of a method."""

Seconds = Annotated[float, Field(ge=0, lt=1 << 31)]


class Rehearsal(Message):
    """The times, the memory and the bytes of a round, as one worker measured or computed them."""

    synthetic: bool = False
    """True if the rows were synthetic, of the declared shape."""
    examples: Counted = 0
    """The examples, or protected groups, of a round."""
    steps: Counted = 0
    """Of a round, in all phases."""
    check_seconds: Seconds = 0.0
    """Checking the model, once in a run."""
    fetch_seconds: Seconds = 0.0
    load_seconds: Seconds = 0.0
    """Building the model, and everything beside tokenizing and steps, such as a choice of blocks."""
    tokenize_seconds: Seconds = 0.0
    """Estimated for the whole data set, which is converted once in a run."""
    train_seconds: Seconds = 0.0
    """Estimated for all steps of a round."""
    download_bytes: Counted = 0
    """Fetched in `fetch_seconds`; blobs that were here are not fetched again."""
    version_bytes: Counted = 0
    """The blocks that the first round fetches."""
    sent_bytes: Counted = 0
    """The blocks that a round sends, before the codec: the most that later rounds fetch."""
    update_bytes: Counted = 0
    """The update of these steps, as it would be sent."""
    upload_bytes_per_second: Annotated[float, Field(gt=0, lt=1 << 53)] | None = None
    """The upload rate that the site declares, or limits; None if neither."""
    device_bytes: Counted | None = None
    """The most memory of a GPU that training held at once."""
    host_bytes: Counted | None = None
    """The most memory of the process so far; None if it would depend on examples that may reveal nothing."""
    epsilon: Annotated[float, Field(ge=0, lt=1 << 53)] | None = None
    """The whole run's epsilon for this site's examples; None without differential privacy."""

    @property
    def download_bytes_per_second(self) -> float | None:
        """The speed of the line; None if too little was fetched to know it."""
        return self.download_bytes / self.fetch_seconds if self.download_bytes and self.fetch_seconds else None
