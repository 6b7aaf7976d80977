"""Errors to HTTP statuses: one table."""

from __future__ import annotations

from collections.abc import Collection

from encoder import errors
from encoder.errors import EncoderPoolError

STATUS: dict[type[EncoderPoolError], int] = {
    errors.RequestError: 400,
    errors.UnauthorizedError: 401,
    errors.ForbiddenError: 403,
    errors.UnknownModelError: 404,
    errors.RequestTooLargeError: 413,
    errors.MediaTooLargeError: 413,
    errors.ContentTypeError: 415,
    errors.BadMediaError: 422,
    errors.PoisonItemError: 422,
    errors.RateLimitError: 429,
    errors.PoolSaturatedError: 429,
    errors.EncodeError: 500,
    errors.WorkerLostError: 503,
    errors.WorkerStartError: 503,
    errors.PoolClosedError: 503,
    errors.DeadlineError: 504,
}

RETRY = frozenset({429, 503})
"""Statuses that say `Retry-After`."""


def status_of(error: EncoderPoolError) -> int:
    """The status of the nearest type that the table names."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def joint_status(statuses: Collection[int]) -> int:
    """The status of an answer with items of these: theirs when they agree, else 207, and each item has its own."""
    first, *others = set(statuses)
    return 207 if others else first
