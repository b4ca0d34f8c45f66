"""Names that are alike: in another Unicode form, or misspelt, with suggestions."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from unicodedata import normalize

SUGGESTED, MISSPELT = 0.62, 0.8
"""Similarity of a name worth suggesting, and of one that can hardly mean anything else."""
MAX_LISTED = 24
MAX_CHARACTERS = 64


def composed(text: str) -> str:
    """Return text in Unicode's composed form (NFC): macOS writes an accent as a letter of its own."""
    return normalize("NFC", text)


def nearest(name: str, known: Iterable[str], similarity: float = SUGGESTED) -> str | None:
    """Return the known name that `name` resembles most, or None. Ignores case and Unicode forms."""
    by_lower = {composed(one).lower(): one for one in known}
    lower = composed(name[:MAX_CHARACTERS]).lower()
    swapped = (one for one in by_lower if sorted(one) == sorted(lower))
    close = next(swapped, None) or next(iter(get_close_matches(lower, by_lower, 1, similarity)), None)
    return by_lower[close] if close is not None else None


def did_you_mean(name: str, known: Iterable[str], similarity: float = SUGGESTED) -> str:
    """Return a clause to append to a message: the nearest known name, else all of them if they are few."""
    names = sorted(known)
    if close := nearest(name, names, similarity):
        return f"; did you mean `{close}`?"
    return f"; it can be {', '.join(names)}" if 0 < len(names) <= MAX_LISTED else ""


def unread(path: Path | None, fault: Exception) -> str:
    """Return the reason why a file cannot be read; if it is missing, with the nearest name."""
    if path and isinstance(fault, FileNotFoundError):
        return absent(path)
    return "it is not text" if isinstance(fault, UnicodeError) else getattr(fault, "strerror", None) or str(fault)


def absent(path: Path, remedy: str = "check the path") -> str:
    """Return the message for a path where nothing is, with the nearest name in its folder or else the remedy."""
    # A file of another kind, such as settings in place of a token, would be no remedy.
    alike = (
        file.name for file in path.parent.glob("*") if nearest(path.suffix, (file.suffix,), MISSPELT) is not None
    )
    near = nearest(path.name, alike, MISSPELT)
    if near and composed(near) == composed(path.name):
        remedy, near = "its folder has this name in another Unicode form, as macOS writes it: rename the file", None
    return f"there is no file or folder {path}; " + (f"did you mean `{near}`?" if near else remedy)
