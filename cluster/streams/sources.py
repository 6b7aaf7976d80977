"""What a client is given to encode, and how it gets at the bytes."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG

from encoder.errors import BadMediaError, ItemError, MediaTooLargeError, kind_of

Source = str | os.PathLike[str] | bytes | bytearray | memoryview
"""A path, or the encoded bytes themselves."""


def read_source(source: Source, max_bytes: int) -> bytes:
    """The encoded bytes of a path, or those given. A file over the limit is refused unread."""
    if isinstance(source, bytes):
        return source
    try:
        if isinstance(source, bytearray | memoryview):
            return bytes(source)
        path = Path(source)
        status = path.stat()
        if not S_ISREG(status.st_mode):  # a pipe or a device may have no end
            raise BadMediaError(f"{path} cannot be read: it is a folder, a pipe or a device; name a file")
        if status.st_size > max_bytes:
            raise MediaTooLargeError(
                f"{path} has {status.st_size} bytes, the limit is {max_bytes}; "
                f"send it smaller or raise encoder.max_bytes"
            )
        return path.read_bytes()
    except ItemError:
        raise
    except TypeError as error:
        raise BadMediaError(f"a source is a path or a file's bytes, got {kind_of(source)}") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte, a memoryview that was released
        reason = getattr(error, "strerror", None) or str(error)
        raise BadMediaError(f"{source} cannot be read: {reason}") from error
