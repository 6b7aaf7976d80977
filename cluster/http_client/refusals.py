"""Why a request came to nothing: what the gateway said, or that nobody answers."""

from __future__ import annotations

import os

import aiohttp

from cluster.gateway.wire import ItemAnswer
from encoder.errors import ERRORS, EncoderPoolError, PoolError, RequestError, RequestTooLargeError


class PutOff(Exception):
    """The whole request may be asked again."""

    def __init__(self, error: EncoderPoolError, retry_after_s: float | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_s = retry_after_s


def error_of(answer: ItemAnswer) -> EncoderPoolError:
    """The error of an item that failed, typed again."""
    return ERRORS.get(answer.error or "", EncoderPoolError)(answer.message)


async def refusal(response: aiohttp.ClientResponse) -> EncoderPoolError:
    """What an answer without items says."""
    try:
        error = (await response.json(content_type=None))["error"]
        return ERRORS.get(error["type"], RequestError)(error["message"])
    except (ValueError, KeyError, TypeError, aiohttp.ClientError):
        if response.status == 413:
            return RequestTooLargeError(f"{response.url.origin()} takes no request so large: a proxy's limit?")
        return PoolError(f"{response.url.origin()} answers {response.status} {response.reason}: is it a gateway?")


def retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Seconds that it says to wait."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else None


def unreachable(url: str, error: BaseException) -> PoolError:
    """Nobody answers there."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        inner = error.os_error
        number = inner.errno or 0  # less than 0: of a name that is not known
        reason = os.strerror(number) if number > 0 else inner.strerror or str(inner)
    return PoolError(f"the gateway at {url} does not answer: {reason}")
