"""The output directory of `encpool encode`, looked at before anything heavy is loaded or started."""

from __future__ import annotations

import tempfile
from pathlib import Path

from encoder.errors import ConfigError

MANIFEST = "manifest.jsonl"


def check_directory(directory: Path, *, overwrite: bool = False) -> None:
    """Make the output directory, and look for an earlier run's results in it.

    Raises ConfigError when it holds some and `overwrite` does not allow to replace them, or can be no directory.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()  # a folder of somebody else's, a file system mounted read-only
        check_results(directory, overwrite=overwrite)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror or error}") from error


def check_results(directory: Path, *, overwrite: bool) -> None:
    """Raises ConfigError when it holds an earlier run's results that must not be replaced. Makes no directory."""
    if not overwrite and (earlier := results_in(directory)):
        raise ConfigError(
            f"{directory} holds {earlier[0].name} of an earlier run; name another --out or pass --overwrite"
        )


def results_in(directory: Path) -> list[Path]:
    """Files of a run, the manifest first: it names the parts."""
    patterns = (MANIFEST, "part-*.safetensors", ".part-*.tmp")
    return [path for pattern in patterns for path in sorted(directory.glob(pattern))]
