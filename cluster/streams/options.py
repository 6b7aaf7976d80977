"""What a caller says of a call's items beside their sources, checked before the first of them is read."""

from __future__ import annotations

import math
from contextlib import suppress
from numbers import Real

from encoder.errors import ConfigError, kind_of


def read_timeout(timeout_s: object) -> float | None:
    """The timeout in seconds, None for none. Raises ConfigError for what is no number of them."""
    if timeout_s is None:
        return None
    with suppress(OverflowError):  # of an integer that no float holds
        if isinstance(timeout_s, Real) and not math.isnan(timeout_s):
            return float(timeout_s)
    raise ConfigError(f"timeout_s is a number of seconds or None, got {kind_of(timeout_s)} {timeout_s!r}")


def read_scope(scope: object) -> str | None:
    """The scope. Raises ConfigError for what cannot be in a cache's key: a worker would fail the whole call."""
    if scope is None:
        return None
    if not isinstance(scope, str):
        raise ConfigError(f"a scope is a name or None, got {kind_of(scope)}")
    try:
        scope.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"scope {scope!r} is no text: {error.reason}") from error
    return scope
