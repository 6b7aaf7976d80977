"""Every error encpool raises on purpose.

    EncoderPoolError
    |-- ConfigError (ValueError)        a configuration, model name or axis that cannot work
    |-- WeightsError (ValueError)       a checkpoint with missing, misshapen or unreadable tensors
    |-- ItemError                       one item cannot be encoded; its neighbours are unaffected
    |   |-- BadMediaError (ValueError)      no image or video we read, damaged, or unreadable from disk
    |   |-- MediaTooLargeError (ValueError) over the limit of bytes, pixels or seconds
    |   |-- PoisonItemError                 it was on two workers that died: encoded nowhere again
    |   |-- EncodeError                     the encoder itself failed on this item
    |   `-- DeadlineError                   its deadline passed before it ran
    |-- PoolError                       the pool, not the item
    |   |-- PoolSaturatedError              no worker has room; come back later
    |   |-- WorkerLostError                 workers died and nobody is left to take the item
    |   |-- WorkerStartError                a worker could not load, capture or answer its probe
    |   `-- PoolClosedError                 the pool is shut down or draining
    `-- RequestError (ValueError)       a request over HTTP that says nothing we can do
        |-- UnauthorizedError               no token, or one that nobody gave out
        |-- ForbiddenError                  what this token, or this gateway, does not allow
        |-- UnknownModelError               a model that is not served
        |-- RequestTooLargeError            more bytes or items than a request may have
        |-- ContentTypeError                a body of another kind than JSON, msgpack or a form
        `-- RateLimitError                  this token asks too often or for too much at once

Each takes one message, so that it pickles and Ray raises it at the caller's side with its type intact.
"""

from __future__ import annotations


class EncoderPoolError(Exception):
    """Base of everything below."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class ConfigError(EncoderPoolError, ValueError):
    """A configuration, model name or axis that cannot work."""


class WeightsError(EncoderPoolError, ValueError):
    """A checkpoint with missing, misshapen or unreadable tensors."""


class ItemError(EncoderPoolError):
    """One item cannot be encoded; its neighbours are unaffected."""


class BadMediaError(ItemError, ValueError):
    """No image or video we read, damaged, or unreadable from disk."""


class MediaTooLargeError(ItemError, ValueError):
    """Over the limit of bytes, pixels or seconds."""


class PoisonItemError(ItemError):
    """The item was on two workers that died; it is not tried again."""


class EncodeError(ItemError):
    """The encoder failed on this item."""


class DeadlineError(ItemError):
    """The item's deadline passed before it ran."""


class PoolError(EncoderPoolError):
    """The pool, not the item, is the reason."""


class PoolSaturatedError(PoolError):
    """No worker has room; the message says when to come back."""


class WorkerLostError(PoolError):
    """Workers died and nobody is left to take the item."""


class WorkerStartError(PoolError):
    """A worker could not load, capture or answer its probe."""


class PoolClosedError(PoolError):
    """The pool is shut down or draining."""


class RequestError(EncoderPoolError, ValueError):
    """A request over HTTP that says nothing we can do."""


class UnauthorizedError(RequestError):
    """No token, or one that nobody gave out."""


class ForbiddenError(RequestError):
    """What this token, or this gateway, does not allow."""


class UnknownModelError(RequestError):
    """A model that is not served."""


class RequestTooLargeError(RequestError):
    """More bytes or items than a request may have."""


class ContentTypeError(RequestError):
    """A body of another kind than JSON, msgpack or a form."""


class RateLimitError(RequestError):
    """This token asks too often or for too much at once."""


def kind_of(value: object) -> str:
    """What came, for the message that says what fits: `nothing`, `a list`, `an int`."""
    kind = type(value).__name__
    return "nothing" if value is None else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


ERRORS: dict[str, type[EncoderPoolError]] = {
    cls.__name__: cls
    for cls in (
        ConfigError,
        WeightsError,
        ItemError,
        BadMediaError,
        MediaTooLargeError,
        PoisonItemError,
        EncodeError,
        DeadlineError,
        PoolError,
        PoolSaturatedError,
        WorkerLostError,
        WorkerStartError,
        PoolClosedError,
        RequestError,
        UnauthorizedError,
        ForbiddenError,
        UnknownModelError,
        RequestTooLargeError,
        ContentTypeError,
        RateLimitError,
    )
}
"""Error types by name, for what crosses a process as (name, message)."""
