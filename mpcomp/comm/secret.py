"""The secret that the ranks of a run share, and what is derived from it.

It comes from the environment, and is never sent: ranks show that they have it by codes (HMAC, RFC
2104, with SHA-256) of fresh random numbers of all of them, so that what one run has shown is of no
use in another. See docs/guide/security.md for what that protects, and what it does not.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

__all__ = ["ENVIRONMENT", "ENVIRONMENT_FILE", "Secret", "given_secret"]

ENVIRONMENT: Final = "MPCOMP_SECRET"
ENVIRONMENT_FILE: Final = "MPCOMP_SECRET_FILE"
#: Characters: whoever sees the codes can try words at leisure.
_LEAST: Final = 16


class Secret:
    """A secret, or a key that was derived from one.

    Args:
        key: its bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __repr__(self) -> str:
        return "Secret(...)"  # tracebacks show variables

    def code(self, *parts: str) -> str:
        """The code of some words, in hexadecimal digits; only who has the secret can make it."""
        message = "".join(f"{len(part)}:{part}" for part in parts)
        return hmac.new(self._key, message.encode(), "sha256").hexdigest()

    def made(self, code: object, *parts: str) -> bool:
        """Whether a code is that of these words."""
        return isinstance(code, str) and hmac.compare_digest(
            code.encode(), self.code(*parts).encode()
        )

    def for_run(self, nonces: Sequence[str]) -> Secret:
        """The key of one run, of the random numbers of all of its ranks."""
        return Secret(bytes.fromhex(self.code("run", *nonces)))


def given_secret(environment: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret of this process; None if it was given none.

    Raises:
        ValueError: it is too short, given twice, or its file cannot be read.
    """
    word, file = environment.get(ENVIRONMENT), environment.get(ENVIRONMENT_FILE)
    if word is None and file is None:
        return None
    if word is not None and file is not None:
        raise ValueError(f"{ENVIRONMENT} and {ENVIRONMENT_FILE} are both set: keep one of them")
    name = ENVIRONMENT
    if file is not None:
        name = f"{ENVIRONMENT_FILE}={file}"
        try:
            word = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name}: the secret cannot be read ({error})") from error
    assert word is not None
    word = word.strip()
    if len(word) < _LEAST:
        raise ValueError(
            f"{name} has {len(word)} characters: expected {_LEAST} or more, as made by "
            "`openssl rand -hex 32`"
        )
    return Secret(word.encode())
