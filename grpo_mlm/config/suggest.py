"""Nearest valid names, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

CUTOFF = 0.6
"""Similarity (difflib's ratio) below which a name is no help."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None where none is like it."""
    matches = get_close_matches(name, list(known), n=1, cutoff=CUTOFF)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the end of a message, or nothing."""
    match = nearest(name, known)
    return f"; did you mean {match}?" if match else ""


def nearest_path(path: str, known: Iterable[str]) -> str | None:
    """The known dotted path that someone who wrote `path` most likely meant, or None.

    In order: the same last name in another place, a similar name in the same place, a similar name anywhere.
    """
    paths = list(known)
    parent, _, leaf = path.rpartition(".")
    elsewhere = [p for p in paths if p.rpartition(".")[2] == leaf]
    if elsewhere:
        return max(elsewhere, key=lambda p: SequenceMatcher(None, path, p).ratio())
    siblings = {p.rpartition(".")[2]: p for p in paths if p.rpartition(".")[0] == parent}
    anywhere = {p.rpartition(".")[2]: p for p in reversed(paths)}
    for names in (siblings, anywhere):
        match = nearest(leaf, names)
        if match:
            return names[match]
    return None
