"""What the released `config.json` of MiniCPM-V 2.5, 2.6, 4.0 and 4.5 says of the vision part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from encoder.adapters.processors import whole_number
from encoder.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPMVSizes:
    """Sizes of tower and resampler, and how images are sliced."""

    version: str
    width: int  # of the tower
    mlp_width: int
    num_layers: int  # stored ones
    num_heads: int
    patch_size: int
    table_side: int  # of the square table of position embeddings
    drop_last_layer: bool
    layer_norm_eps: float
    token_width: int
    queries: int  # tokens a slice
    max_slice_nums: int
    scale_resolution: int

    @property
    def nominal_patches(self) -> int:
        """Patches of a square slice; others have a few more or less."""
        return (self.scale_resolution // self.patch_size) ** 2

    @property
    def patch_bytes(self) -> int:
        """Numbers of a patch."""
        return 3 * self.patch_size**2


def read_sizes(config: Mapping[str, Any], name: str) -> MiniCPMVSizes:
    """Read a released config.

    Raises:
        ConfigError: a version other than these, or a size that is missing or impossible.
    """
    version = _version(config)
    vision, slicing = _table(config, "vision_config", name), config.get("slice_config") or {}
    where = f"{name}: config.json"
    patch_size = whole_number(vision, "patch_size", where)
    sizes = MiniCPMVSizes(
        version=version,
        width=whole_number(vision, "hidden_size", where),
        mlp_width=whole_number(vision, "intermediate_size", where),
        num_layers=whole_number(vision, "num_hidden_layers", where),
        num_heads=whole_number(vision, "num_attention_heads", where),
        patch_size=patch_size,
        table_side=whole_number(vision, "image_size", where) // patch_size,
        drop_last_layer=bool(config.get("drop_vision_last_layer", True)),
        layer_norm_eps=float(vision.get("layer_norm_eps", 1e-6)),
        token_width=whole_number(config, "hidden_size", where),
        queries=whole_number(config, "query_num", where),
        max_slice_nums=whole_number({"max_slice_nums": 9} | dict(slicing), "max_slice_nums", where),
        scale_resolution=whole_number({"scale_resolution": 448} | dict(slicing), "scale_resolution", where),
    )
    if sizes.token_width % 128:
        raise ConfigError(f"{name}: hidden_size is {sizes.token_width}; the resampler's heads are 128 wide")
    if sizes.width % sizes.num_heads:
        raise ConfigError(f"{name}: the tower's width {sizes.width} is no multiple of its {sizes.num_heads} heads")
    return sizes


def _version(config: Mapping[str, Any]) -> str:
    """2.5, 2.6, 4.0 or 4.5, from the key `version` or, in old copies, from the sizes."""
    if "version" in config:
        version = ".".join(f"{config['version']}.0".split(".")[:2])
    else:
        version = "2.0" if (config.get("hidden_size"), config.get("query_num")) == (2304, 64) else "2.5"
    if version not in ("2.5", "2.6", "4.0", "4.5"):
        raise ConfigError(f"MiniCPM-V {version} is not supported; 2.5, 2.6, 4.0 and 4.5 are")
    return version


def _table(config: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    value = config.get(key)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: config.json lacks {key!r}, which MiniCPM-V needs")
    return value
