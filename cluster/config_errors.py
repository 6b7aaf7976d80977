"""What pydantic finds wrong with a configuration, in the words of who wrote the YAML."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

IN_YAML = {
    "tuple_type": "input should be a list",
    "dict_type": "input should be a map of keys",
    "model_type": "input should be a map of keys",
    "byte_size": "input should be a number of bytes, such as 268435456 or 256MiB",
}
"""What pydantic says in Python's words, or not at all, by the type of its error."""

OF_A_UNION = re.compile(r"bool|(literal|tuple|dict)\[.*")
"""What pydantic adds to a key's path where several types fit: which of them it tried."""


def explain(detail: ErrorDetails, root: type[BaseModel]) -> str:
    """One thing that is wrong with the settings of a `root`: the key as people write it, and what fits."""
    where = ".".join(str(part) for part in detail["loc"] if not OF_A_UNION.fullmatch(str(part)))
    if detail["type"] == "extra_forbidden":
        *parents, key = detail["loc"]
        if _is_setting([*parents, *str(key).split(".")], root):
            nested = "{".join(f"{part}: " for part in str(key).split("."))
            return f"unknown key '{where}': keys are not joined by dots, write '{nested}...{'}' * str(key).count('.')}'"
        here, prefix = _model_at(parents, root), "".join(f"{part}." for part in parents)
        known = list(here.model_fields)
        elsewhere = [*_places_of(str(key), here, prefix), *_places_of(str(key), root)]
        close = [prefix + name for name in difflib.get_close_matches(str(key), known, n=1)]
        if meant := elsewhere + close:
            return f"unknown key '{where}', did you mean '{meant[0]}'?"
        return f"unknown key '{where}', known here: {', '.join(known)}"
    if detail["type"] == "missing":
        return f"key '{where}' is missing"
    text = IN_YAML.get(detail["type"]) or detail["msg"].removeprefix("Value error, ")
    message = text[0].lower() + text[1:]
    shown = "" if isinstance(detail["input"], Mapping | list | tuple) else f", got {detail['input']!r}"
    return f"{where}: {message}{shown}"


def _is_setting(loc: list[int | str], root: type[BaseModel]) -> bool:
    """Whether there is a key where `loc` leads to."""
    try:
        return loc[-1] in _model_at(loc[:-1], root).model_fields
    except KeyError:
        return False


def _places_of(key: str, model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Where a model, or one within it, has such a key."""
    for name, field in model.model_fields.items():
        if name == key:
            yield above + name
        inner = _model_of(field.annotation)
        if inner is not None and get_origin(field.annotation) is not tuple:  # a list's places have numbers
            yield from _places_of(key, inner, f"{above}{name}.")


def _model_of(annotation: Any) -> type[BaseModel] | None:
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _model_at(loc: list[int | str], root: type[BaseModel]) -> type[BaseModel]:
    """The model that the keys `loc` lead to, from the root."""
    model = root
    for part in loc:
        if isinstance(part, int):  # a place in a list of models
            continue
        inner = _model_of(model.model_fields[part].annotation)
        if inner is None:
            raise KeyError(part)
        model = inner
    return model
