"""Where a secret goes that is shown only once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tessera.shared.api.admin import IssuedToken
from tessera.shared.problems import Invalid


@contextmanager
def place_for(file: Path | None) -> Iterator[TextIO | None]:
    """Yield a new file that only its owner may read, opened before the secret is issued: a lost one cannot be had
    again.

    Nothing if `file` is None. Raises Invalid if it exists or cannot be made; it is removed if no secret came.
    """
    if file is None:
        yield None
        return
    try:
        opened = os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii")
    except OSError as fault:
        detail = f"{file} cannot be made: {fault.strerror}; no token was issued"
        raise Invalid(detail, remedy="Remove it or choose another name.") from fault
    written = False
    try:
        with opened:
            yield opened
            written = opened.tell() > 0
    finally:
        if not written:
            file.unlink()


def put_secret(issued: IssuedToken, file: TextIO | None) -> None:
    if file:
        file.write(f"{issued.secret}\n")
