"""transformers' own vision modules as encoders: built from a config, loaded from released tensors, captured whole."""

# Shapes: N tiles, H and W pixels of a tile, T tokens (of a tile), E width of a token; P patches of a run, C numbers of
# a patch, D model width.

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from encoder.adapters.stock_families import GridFamily, Pixels, Rows, StockFamily, TileFamily, ViewFamily
from encoder.adapters.tile_kind import Size
from encoder.kernels.elementwise import fold_pixels, patches_to_pixels
from encoder.towers.stock_attention import Boundaries, attend_raggedly, fuse, within
from encoder.types import AxisKeys, Capacity


def stock_class(model: str, name: str) -> Any:
    """A class of transformers, such as SiglipVisionModel of "siglip"; its types differ between versions."""
    file = "configuration" if name.endswith("Config") else "modeling"
    return getattr(importlib.import_module(f"transformers.models.{model}.{file}_{model}"), name)


def stock_config(model: str, name: str, values: Mapping[str, Any]) -> Any:
    """A config of these values."""
    config = stock_class(model, name).from_dict(dict(values))
    config._attn_implementation = "sdpa"
    return config


def weight_shapes(family: StockFamily) -> dict[str, tuple[int, ...]]:
    """Released names and shapes of everything that a checkpoint holds for these modules; nothing is allocated."""
    with torch.device("meta"):
        modules = family.modules()
    return {
        _released(family, prefix, name): tuple(tensor.shape)
        for prefix, module in modules.items()
        for name, tensor in module.state_dict().items()
    }


def load_modules(
    family: StockFamily, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The modules on a device, their tensors in `dtype`; what they compute for themselves keeps the dtype it has."""
    from transformers.initialization import no_init_weights

    with torch.device("cpu"), no_init_weights():
        modules = dict(family.modules())
    for prefix, module in modules.items():
        names = {name: _released(family, prefix, name) for name in module.state_dict()}
        module.load_state_dict({name: weights[stored].to(device, dtype) for name, stored in names.items()}, assign=True)
        module.to(device).eval().requires_grad_(False)
    return modules


def _released(family: StockFamily, prefix: str, name: str) -> str:
    """What a released checkpoint calls a module's tensor."""
    name = f"{prefix}{name}"
    for pattern, replacement in family.renames:
        name = re.sub(pattern, replacement, name)
    return name


class Normalise:
    """uint8 pixels to what the family was trained on: `(v / 255 - mean) / std`, float32 until it is rounded once."""

    def __init__(self, pixels: Pixels, device: torch.device, dtype: torch.dtype) -> None:
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (pixels.mean, pixels.std))
        self.scale_C = (1 / (255 * std)).float().to(device)
        self.shift_C = (-mean / std).float().to(device)
        self.dtype = dtype

    def __call__(self, bytes_C: Tensor) -> Tensor:
        """Any shape whose last dimension is the channel."""
        return bytes_C.mul(self.scale_C).add_(self.shift_C).to(self.dtype)

    def tiles(self, rows_NC: Tensor, size: Size) -> Tensor:
        """`[N, 3, H, W]` of tiles of this width and height, whose rows are (y, x, channel)."""
        width, height = size
        return self(rows_NC.view(-1, height, width, 3)).permute(0, 3, 1, 2).contiguous()


class TileModel:
    """Dense tiles through a family's modules, those of one size in a run. Implements `EncoderModel`."""

    def __init__(
        self,
        family: TileFamily | ViewFamily,
        sizes: Mapping[str, Size],
        weights: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`sizes` of the tiles are by axis key."""
        bound = family.bind(load_modules(family, weights, device, dtype))
        self._forwards = bound if isinstance(bound, Mapping) else dict.fromkeys(sizes, bound)
        self._normalise = Normalise(family.pixels, device, dtype)
        self._sizes = sizes

    def reserve(self, longest: int) -> None:
        """Nothing depends on lengths."""

    def forward(self, inputs: Mapping[str, Tensor], axis_keys: AxisKeys, capacity: Capacity) -> Tensor:
        """Tokens `[N * T, E]`."""
        key = str(axis_keys[0])
        return self._forwards[key](self._normalise.tiles(inputs["pixels"], self._sizes[key])).flatten(0, 1)


class PatchEmbedding:
    """uint8 patch rows to the model's width by one GEMM, with the normalisation of pixels folded into it.

    A module that stacks frames takes them side by side: (frame, y, x, channel).
    """

    def __init__(self, module: torch.nn.Module, pixels: Pixels, *, channels_last: bool = False) -> None:
        """`module` is a convolution over one patch, or a linear layer over (y, x, channel) when `channels_last`."""
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        weight_DLC = weight.unflatten(1, (-1, 3)) if channels_last else weight.flatten(2).transpose(1, 2)
        folded = fold_pixels(weight_DLC, bias if isinstance(bias, Tensor) else None, pixels.mean, pixels.std)
        self.weight, self.bias = (tensor.to(weight.dtype) for tensor in folded)

    def __call__(self, pixels_PC: Tensor) -> Tensor:
        """`[P, D]`."""
        x_PC = patches_to_pixels(pixels_PC, width=self.weight.shape[1], dtype=self.weight.dtype)
        return torch.nn.functional.linear(x_PC, self.weight, self.bias)


Attending = Literal["fused", "ragged", "alone"]
"""Ours over the modules' weights, the modules' own within segments, or all rows to all: for segments that run alone."""


class GridModel:
    """Packed patches of any grids through a family's modules. Implements `EncoderModel`."""

    def __init__(
        self,
        family: GridFamily,
        weights: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        backend: str,
        *,
        attending: Attending = "fused",
    ) -> None:
        modules = load_modules(family, weights, device, dtype)
        self._forward: Callable[[Rows], Tensor] = family.bind(modules)
        if attending == "fused":
            fuse(modules)
        elif attending == "ragged":
            attend_raggedly(modules)
        self._backend = backend

    def reserve(self, longest: int) -> None:
        """Nothing depends on lengths."""

    def forward(self, inputs: Mapping[str, Tensor], axis_keys: AxisKeys, capacity: Capacity) -> Tensor:
        """Tokens `[T, E]`."""
        tables = {name: tensor for name, tensor in inputs.items() if name not in ("pixels", "cu_seqlens")}
        rows = Rows(pixels_PC=inputs["pixels"], tables=tables, cu_seqlens=inputs["cu_seqlens"])
        with within(Boundaries(backend=self._backend, cu_seqlens=rows.cu_seqlens, longest=capacity.longest)):
            return self._forward(rows)
