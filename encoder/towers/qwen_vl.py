"""Qwen-VL's vision tower over packed segments: fused blocks, and mergers of neighbouring patches into tokens."""

# Shapes: P patches, C numbers of a patch, D tower width, T tokens, E width of a token.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.adapters.qwen_vl_weights import MERGER_NAMES, MLP_NAMES, PREFIX
from encoder.attention import SelfAttention, self_attention
from encoder.kernels.elementwise import fold_pixels, patches_to_pixels
from encoder.kernels.gather import add_weighted_rows_
from encoder.kernels.rotary import rotary_rows, rotary_tables, rotate_
from encoder.kernels.windows import MAX_WINDOW, window_attention
from encoder.towers.rotary_vit import Activation, Block, Linear, Norm, activated, run_blocks
from encoder.types import AxisKeys, Capacity

if TYPE_CHECKING:
    from encoder.adapters.qwen_vl_config import QwenSizes

ALIGNED = 64
"""The MLP's width is padded to a multiple of this: rows of 3420 numbers make every GEMM over them slow."""

_ACTIVATIONS: dict[str, Activation] = {"2": "quick", "2.5": "swiglu", "3": "tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Merger:
    """Patches of a token, side by side, to one row. `norm` is over a patch, or over the token (`joined`)."""

    norm: Norm
    fc1: Linear
    fc2: Linear

    def of(self, normed_PD: Tensor) -> Tensor:
        """Tokens `[T, E]` of normed patches."""
        joined_TM = normed_PD.view(-1, self.fc1.weight.shape[1])
        return self.fc2.of(activated(self.fc1, joined_TM, "exact"))


class QwenVLModel:
    """Implements `EncoderModel`."""

    def __init__(
        self, sizes: QwenSizes, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype, backend: str
    ) -> None:
        self.sizes, self.backend, self.device = sizes, backend, device
        self.head_width = sizes.width // sizes.num_heads
        self.max_window = (sizes.window_tokens * sizes.merge_size) ** 2
        assert self.max_window <= MAX_WINDOW
        stored = _Stored(weights, PREFIX[sizes.generation], device, dtype)
        self.patch_embed = stored.patch_embed(sizes)
        self.blocks = [stored.block(sizes, index) for index in range(sizes.num_layers)]
        norm, first, second = MERGER_NAMES[sizes.generation]
        self.merger, *self.deepstack = (
            Merger(
                norm=stored.norm(f"{name}.{norm}"),
                fc1=stored.linear(f"{name}.{first}"),
                fc2=stored.linear(f"{name}.{second}"),
            )
            for name in ("merger", *(f"deepstack_merger_list.{level}" for level in range(len(sizes.deepstack_layers))))
        )
        self.positions = stored.put("pos_embed.weight") if sizes.table_side else None
        self._tables: list[tuple[Tensor, Tensor]] = []  # rotary ones; the last is in use

    def reserve(self, longest: int) -> None:
        """Make rotary tables for the coordinates of such segments."""
        size = max(1, longest // self.sizes.merge_size)
        if not self._tables or len(self._tables[-1][0]) < size:
            # Smaller tables stay: graphs that were captured with them still read them.
            self._tables.append(rotary_tables(1 << (size - 1).bit_length(), self.head_width, self.device))

    def forward(self, inputs: Mapping[str, Tensor], axis_keys: AxisKeys, capacity: Capacity) -> Tensor:
        """Rows `[capacity.tokens, (1 + levels) * E]`."""
        sizes = self.sizes
        weight = self.patch_embed.weight
        x_PD = self.patch_embed.of(patches_to_pixels(inputs["pixels"], width=weight.shape[1], dtype=weight.dtype))
        if self.positions is not None:
            add_weighted_rows_(x_PD, self.positions, inputs["taps"], inputs["tap_weights"])
        h_PD, kept = run_blocks(
            x_PD,
            self.blocks,
            self.merger.norm,
            _ACTIVATIONS[sizes.generation],
            self._attends(inputs, capacity),
            keep=sizes.deepstack_layers,
        )
        tokens = [self.merger.of(h_PD)]
        for merger, layer in zip(self.deepstack, sizes.deepstack_layers, strict=True):
            joined_TM = kept[layer].view(-1, merger.fc1.weight.shape[1])
            tokens.append(merger.of(merger.norm.of(joined_TM)))
        rows = torch.cat(tokens, dim=1) if self.deepstack else tokens[0]
        return rows.index_select(0, inputs["places"]) if sizes.window_tokens else rows

    def _attends(self, inputs: Mapping[str, Tensor], capacity: Capacity) -> list[SelfAttention]:
        """Attention of each layer: over whole segments, or within windows."""
        sizes, heads = self.sizes, self.sizes.num_heads
        cos, sin = rotary_rows(self._tables[-1], inputs["rows"], inputs["columns"])
        whole = self_attention(self.backend, inputs["cu_seqlens"], heads, self.head_width, capacity.longest)

        def attend(qkv: Tensor) -> Tensor:
            return whole(rotate_(qkv, cos, sin, heads))

        if not sizes.window_tokens:
            return [attend] * sizes.num_layers
        cu_windows = inputs["cu_windows"]
        within = self_attention(self.backend, cu_windows, heads, self.head_width, self.max_window)

        def attend_within(qkv: Tensor) -> Tensor:
            if self.backend == "triton":
                return window_attention(qkv, cu_windows, cos, sin, heads)
            return within(rotate_(qkv, cos, sin, heads))

        return [attend if index in sizes.full_layers else attend_within for index in range(sizes.num_layers)]


class _Stored:
    """Released tensors, on their way to the device."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, device: torch.device, dtype: torch.dtype) -> None:
        self._weights, self._prefix, self._device, self._dtype = weights, prefix, device, dtype

    def raw(self, name: str) -> Tensor:
        return self._weights[f"{self._prefix}.{name}"]

    def put(self, name: str) -> Tensor:
        return self.raw(name).to(self._device, self._dtype).contiguous()

    def norm(self, name: str) -> Norm:
        has_bias = f"{self._prefix}.{name}.bias" in self._weights
        return Norm(weight=self.put(f"{name}.weight"), bias=self.put(f"{name}.bias") if has_bias else None)

    def linear(self, name: str) -> Linear:
        return Linear(weight=self.put(f"{name}.weight"), bias=self.put(f"{name}.bias"))

    def block(self, sizes: QwenSizes, index: int) -> Block:
        layer = f"blocks.{index}"
        *up, down = (f"{layer}.mlp.{name}" for name in MLP_NAMES[sizes.generation])
        padding = -sizes.mlp_width % ALIGNED
        up_weight = torch.cat([F.pad(self.raw(f"{name}.weight"), (0, 0, 0, padding)) for name in up])
        up_bias = torch.cat([F.pad(self.raw(f"{name}.bias"), (0, padding)) for name in up])
        down_weight = F.pad(self.raw(f"{down}.weight"), (0, padding))
        fc1_weight, fc1_bias, fc2_weight = (
            tensor.to(self._device, self._dtype).contiguous() for tensor in (up_weight, up_bias, down_weight)
        )
        return Block(
            norm1=self.norm(f"{layer}.norm1"),
            qkv=self.linear(f"{layer}.attn.qkv"),
            out=self.linear(f"{layer}.attn.proj"),
            norm2=self.norm(f"{layer}.norm2"),
            fc1=Linear(weight=fc1_weight, bias=fc1_bias),
            fc2=Linear(weight=fc2_weight, bias=self.put(f"{down}.bias")),
        )

    def patch_embed(self, sizes: QwenSizes) -> Linear:
        """The patch embedding for rows (frame, y, x, channel), with the normalisation of pixels folded in."""
        weight_DLC = self.raw("patch_embed.proj.weight").flatten(2).transpose(1, 2)
        bias = self._weights.get(f"{self._prefix}.patch_embed.proj.bias")
        weight, bias = fold_pixels(weight_DLC, bias, sizes.pixels.mean, sizes.pixels.std)
        return Linear(weight=weight.to(self._device, self._dtype), bias=bias.to(self._device, self._dtype))
