"""A YAML file's maps and lists, with errors that name it."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from encoder.errors import ConfigError


def read_yaml(path: str | Path) -> Any:
    """What a YAML file holds, unchecked. Raises ConfigError that names the file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        return yaml.load(text, _OnceLoader)
    except (yaml.YAMLError, RecursionError) as error:  # RecursionError: lists in lists without end
        raise ConfigError(f"{path.name}: not YAML: {_one_line(error)}") from error


class _OnceLoader(yaml.SafeLoader):
    """YAML's own loader keeps the last of two equal keys and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"key {key.value!r} stands there twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
