"""The last sentence of an error message: what was probably meant, or what there is."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "did you mean ...?" for the known words next to `word`, else the known words."""
    words = list(dict.fromkeys(known))
    close = difflib.get_close_matches(word, words, n=3)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"there are: {listing(words)}"


def listing(words: Iterable[str], limit: int = 12) -> str:
    """Return `words` quoted and joined by commas, the tail of a long list left out."""
    quoted = [repr(word) for word in words]
    if not quoted:
        return "none"
    tail = [f"... ({len(quoted)} in all)"] if len(quoted) > limit else []
    return ", ".join(quoted[:limit] + tail)
