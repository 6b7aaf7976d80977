"""Who asks: bearer tokens, compared in constant time, and what each may do."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from encoder.errors import ConfigError, ForbiddenError, UnauthorizedError

RIGHTS = frozenset({"encode", "watch"})
MIN_TOKEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Somebody that limits apply to."""

    name: str
    rights: frozenset[str] = RIGHTS


class TokenBook:
    """The tokens that were given out. Keeps their digests only."""

    def __init__(self, tokens: Sequence[tuple[str, Caller]]) -> None:
        self._tokens = [(_digest(token), caller) for token, caller in tokens]

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this `Authorization` header, in the same time whoever it is. Raises UnauthorizedError."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise UnauthorizedError("no token; send the header 'Authorization: Bearer TOKEN'")
        given = _digest(token.strip())
        found = None
        for digest, caller in self._tokens:  # to the end, whoever it is
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None:
            raise UnauthorizedError("this token is not known here")
        return found


def require(caller: Caller, right: str) -> None:
    """Raises ForbiddenError when the caller may not do that."""
    if right not in caller.rights:
        raise ForbiddenError(f"the token of {caller.name!r} may {' and '.join(sorted(caller.rights))}, not {right}")


def read_tokens(path: Path) -> TokenBook:
    """A tokens file: `NAME TOKEN [RIGHT ...]` a line, `#` begins a comment. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gateway.tokens_file: {path} cannot be read: {error}") from error
    tokens: list[tuple[str, Caller]] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) < 2 or len(words[1]) < MIN_TOKEN:  # nothing of the line in the message: it holds a secret
            raise ConfigError(
                f"{path}:{number}: a line is a name, a token of {MIN_TOKEN} letters at least, and perhaps rights"
            )
        rights = frozenset(words[2:]) or RIGHTS
        if not rights <= RIGHTS:
            raise ConfigError(f"{path}:{number}: a right is one of {', '.join(sorted(RIGHTS))}")
        tokens.append((words[1], Caller(name=words[0], rights=rights)))
    if not tokens:
        raise ConfigError(f"{path}: no token in it; nobody could use the gateway")
    return TokenBook(tokens)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()  # a header may hold any bytes
