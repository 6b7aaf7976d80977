"""Arguments of the command line to image and video files: folders, patterns, stable order, ids."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from glob import glob, has_magic

from encoder.errors import ConfigError
from encoder.media import SUFFIXES
from encoder.video import SUFFIXES as VIDEO_SUFFIXES

logger = logging.getLogger(__name__)

MAX_NAMED = 5  # of what is wrong
SUFFIXES_OF_REFUSED_IMAGES = frozenset((".heic", ".heif", ".avif", ".jxl", ".jp2"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file to encode."""

    id: str  # unique in a run, the same in every run that names the file this way, fit for a file name
    path: str  # as given, or as found below what was given


def find_sources(arguments: Sequence[str], *, videos: bool = False) -> list[Source]:
    """Every file that the arguments stand for, in their order.

    A file is taken as it is, whatever its name. Folders are searched to the bottom and patterns are expanded, both
    in the order of their names; of what they hold, hidden files and files without an image's ending (or, with `videos`,
    a video's) are skipped, unless the pattern itself names the ending; a warning counts those with the ending of a
    kind of image that is never read, and videos that are left out. A file that is named twice is encoded twice.

    Raises ConfigError when an argument does not exist or matches nothing, a folder cannot be listed, or no image is
    left.
    """
    check_named(arguments)
    endings = SUFFIXES | VIDEO_SUFFIXES if videos else SUFFIXES
    skipped: list[str] = []
    paths = [path for argument in arguments for path in _files_of(argument, endings, skipped)]
    _warn(
        "skipped %s of kinds that cannot be read (%s), such as %s; save them as JPEG or PNG",
        [path for path in skipped if _ending(path) in SUFFIXES_OF_REFUSED_IMAGES],
        "image",
    )
    _warn(
        "skipped %s (%s), such as %s: this model takes images alone; `encpool models` lists what others take",
        [path for path in skipped if _ending(path) in VIDEO_SUFFIXES],
        "video",
    )
    if not paths:
        raise ConfigError(
            f"no images{' or videos' * videos} in {', '.join(arguments[:MAX_NAMED])}: "
            f"folders are searched for {' '.join(sorted(endings))}"
        )
    return _with_ids(paths)


def check_named(arguments: Sequence[str]) -> None:
    """Raise ConfigError for arguments that do not exist, or are patterns that match nothing."""
    absent = [argument for argument in arguments if not os.path.exists(argument) and not _matches(argument)]
    if absent:
        more = f" and {len(absent) - MAX_NAMED} more" if len(absent) > MAX_NAMED else ""
        raise ConfigError(f"no such file or folder: {', '.join(absent[:MAX_NAMED])}{more}")


def _warn(message: str, skipped: Sequence[str], kind: str) -> None:
    """Log how many files were skipped, their endings and one of them."""
    if skipped:
        number = f"{len(skipped)} {kind}{'s' * (len(skipped) > 1)}"
        logger.warning(message, number, " ".join(sorted({_ending(path) for path in skipped})), skipped[0])


def _matches(pattern: str) -> list[str]:
    """What a pattern matches, by name; nothing when it is no pattern. `**` crosses folders."""
    if not has_magic(pattern):
        return []
    matches = sorted(glob(pattern, recursive=True))
    return _once_each(matches) if "**" in pattern else matches


def _once_each(paths: Sequence[str]) -> list[str]:
    """Without those that lead through a linked folder, perhaps around a loop, to where a shorter path leads as well."""
    nearest: dict[tuple[str, str], str] = {}
    for path in sorted(paths, key=lambda path: path.count(os.sep)):
        folder, name = os.path.split(path.rstrip(os.sep))
        nearest.setdefault((os.path.realpath(folder), name), path)
    return sorted(nearest.values())


def _files_of(argument: str, endings: Set[str], skipped: list[str]) -> Iterator[str]:
    """The files of one argument; what is left out for its ending goes to `skipped`."""
    if os.path.isdir(argument):
        yield from _media_below(argument, endings, skipped)
    elif os.path.exists(argument):
        yield argument
    else:
        ending = os.path.splitext(argument)[1]
        names_ending = bool(ending) and not has_magic(ending)
        in_folders = "**" in argument  # then a folder's files are matched beside it
        for match in _matches(argument):
            if not os.path.isdir(match):
                if names_ending or _ending(match) in endings:
                    yield match
                else:
                    skipped.append(match)
            elif not in_folders:
                yield from _media_below(match, endings, skipped)


def _media_below(folder: str, endings: Set[str], skipped: list[str]) -> Iterator[str]:
    for parent, folders, files in os.walk(folder, onerror=_cannot_list):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.startswith("."):
                continue
            path = os.path.join(parent, name)
            if _ending(name) in endings:
                yield path
            else:
                skipped.append(path)


def _cannot_list(error: OSError) -> None:
    raise ConfigError(f"cannot list folder {error.filename}: {error.strerror}; leave it out or make it readable")


def _ending(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _with_ids(paths: Sequence[str]) -> list[Source]:
    sources = []
    num_taken: dict[str, int] = {}
    for path in paths:
        base = _id_of(path)
        num_taken[base] = count = num_taken.get(base, 0) + 1
        # The hash ends in eight hexadecimal digits, so "-2" makes no other path's id.
        sources.append(Source(id=base if count == 1 else f"{base}-{count}", path=path))
    return sources


def _id_of(path: str) -> str:
    """The file's name for people, and a hash of its whole path for uniqueness."""
    stem = os.path.splitext(os.path.basename(path))[0]
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-")[:48]
    digest = hashlib.sha256(os.fsencode(os.path.normpath(path))).hexdigest()[:8]
    return f"{readable}-{digest}" if readable else digest
