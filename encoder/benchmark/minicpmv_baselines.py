"""What MiniCPM-V's bench measures beside us: transformers' own tower, eagerly, and captured in vLLM's padded grids."""

# Shapes: B slices of a batch, L patches of a slice or grid, D tower width, E token width, Q queries.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from encoder.adapters.base import Segment
from encoder.adapters.layouts import VLLM, parse_layouts
from encoder.adapters.minicpmv import MiniCPMV
from encoder.adapters.minicpmv_positions import patch_indices
from encoder.benchmark.measure import wall_seconds
from encoder.towers.resampler import Resampler

Image = Sequence[Segment]


def transformers_tower(
    adapter: MiniCPMV, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Any:
    """transformers' Idefics2 vision transformer with the released weights; attention by SDPA."""
    from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
    from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

    config = Idefics2VisionConfig(
        hidden_size=adapter.sizes.width,
        intermediate_size=adapter.sizes.mlp_width,
        num_hidden_layers=adapter.sizes.num_layers,
        num_attention_heads=adapter.sizes.num_heads,
        image_size=adapter.sizes.table_side * adapter.sizes.patch_size,
        patch_size=adapter.sizes.patch_size,
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        tower: Any = Idefics2VisionTransformer(config)
    state = {name.removeprefix("vpm."): tensor for name, tensor in weights.items() if name.startswith("vpm.")}
    tower.load_state_dict(state, assign=True)
    return tower.to(device, dtype).eval()


class Stock:
    """transformers' tower and our resampler over slices laid side by side, each at the start of its own `L` rows."""

    def __init__(self, adapter: MiniCPMV, tower: Any, resampler: Resampler, device: torch.device) -> None:
        self.adapter, self.tower, self.resampler, self.device = adapter, tower, resampler, device
        self.dtype: torch.dtype = tower.dtype

    def buffers(self, num_slices: int, length: int) -> dict[str, Tensor]:
        """Inputs of a forward: all padding."""
        return {
            name: torch.zeros(num_slices, length, dtype=torch.int32, device=self.device)
            for name in ("ids", "rows", "columns")
        } | {
            "pixels": torch.zeros(
                num_slices, length, 3 * self.adapter.sizes.patch_size**2, dtype=torch.uint8, device=self.device
            ),
            "mask": torch.zeros(num_slices, 1, 1, length, dtype=self.dtype, device=self.device),
        }

    def fill(self, inputs: dict[str, Tensor], image: Image) -> None:
        """Write an image's slices; what they leave over is masked."""
        for name in ("ids", "rows", "columns"):
            inputs[name].zero_()
        inputs["mask"].fill_(torch.finfo(self.dtype).min)
        for index, segment in enumerate(image):
            _, rows, columns = segment.shape.grid
            length = rows * columns
            ids, row, column = (
                torch.from_numpy(part)
                for part in patch_indices(segment.shape.grid, self.adapter.sizes.table_side, False)
            )
            inputs["pixels"][index, :length].copy_(torch.from_numpy(segment.patches_PC))
            inputs["mask"][index, ..., :length] = 0
            for name, values in (("ids", ids), ("rows", row), ("columns", column)):
                inputs[name][index, :length].copy_(values)

    def forward(self, inputs: dict[str, Tensor], *, masked: bool) -> Tensor:
        """Tokens `[B * Q, E]`."""
        num_slices, length, _ = inputs["pixels"].shape
        tower, mask = self.tower, inputs["mask"] if masked else None
        side = self.adapter.sizes.patch_size
        patches = inputs["pixels"].view(-1, side, side, 3).permute(0, 3, 1, 2)
        pixels = patches.to(self.dtype).mul_(2 / 255).sub_(1)
        x_BLD = tower.embeddings.patch_embedding(pixels).flatten(1).unflatten(0, (num_slices, length))
        x_BLD = x_BLD + tower.embeddings.position_embedding(inputs["ids"])
        encoded = tower.encoder(inputs_embeds=x_BLD, attention_mask=mask).last_hidden_state
        heads = self.resampler.num_heads

        def attend(q_QE: Tensor, k_PE: Tensor, v_PE: Tensor) -> Tensor:
            k, v = (
                rows.unflatten(1, (heads, -1)).unflatten(0, (num_slices, length)).transpose(1, 2)
                for rows in (k_PE, v_PE)
            )
            q = q_QE.unflatten(1, (heads, -1)).transpose(0, 1).expand(num_slices, -1, -1, -1)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return out.transpose(1, 2).flatten(0, 1).flatten(1)

        features_PD = tower.post_layernorm(encoded).flatten(0, 1)
        return self.resampler.forward(features_PD, inputs["rows"].flatten(), inputs["columns"].flatten(), attend)


class EagerLoop:
    """One image at a time, no graphs, in the faster of two ways: all slices in one forward, padded to the longest and
    masked, as the released code does; or slices of one length together, without a mask, so that SDPA takes its fastest
    kernel. Which one is measured when an image of these lengths first comes.
    """

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._joined: dict[tuple[int, ...], bool] = {}

    @torch.inference_mode()
    def encode(self, image: Image) -> Tensor:
        """Tokens `[slices * Q, E]` on the device."""
        lengths = tuple(segment.shape.num_patches for segment in image)
        if len(set(lengths)) == 1:
            return self._forward(image)
        if lengths not in self._joined:
            joined_s, apart_s = (
                min(wall_seconds(partial(way, image), self._stock.device, 2))
                for way in (self._forward, self._by_length)
            )
            self._joined[lengths] = joined_s <= apart_s
        return self._forward(image) if self._joined[lengths] else self._by_length(image)

    def _forward(self, image: Image) -> Tensor:
        lengths = {segment.shape.num_patches for segment in image}
        inputs = self._stock.buffers(len(image), max(lengths))
        self._stock.fill(inputs, image)
        self._stock.resampler.reserve(max(lengths))
        return self._stock.forward(inputs, masked=len(lengths) > 1)

    def _by_length(self, image: Image) -> Tensor:
        places: dict[int, list[int]] = {}
        for index, segment in enumerate(image):
            places.setdefault(segment.shape.num_patches, []).append(index)
        order = [index for group in places.values() for index in group]
        tokens = torch.cat([self._forward([image[index] for index in group]) for group in places.values()])
        restored = torch.empty_like(tokens).view(len(image), -1, tokens.shape[1])
        restored[order] = tokens.view_as(restored)
        return restored.flatten(0, 1)


class PaddedGrids:
    """vLLM's design: all slices of an image in one graph, padded to the smallest of four grids that holds the widest.

    Slices are folded into the grid in sequence order and masked by an additive mask, as in vLLM pull request 42785;
    token budgets are powers of two of slices. A slice that no grid holds cannot be encoded here.
    """

    def __init__(self, stock: Stock, max_slices: int = 16) -> None:
        self._stock = stock
        self._grids = [rectangle for rectangle in parse_layouts(VLLM).values() if rectangle is not None]
        self._budgets = [1 << power for power in range(max_slices.bit_length())]
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph | None, dict[str, Tensor], Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if stock.device.type == "cuda" else None

    def key(self, image: Image) -> tuple[int, int] | None:
        """Patches of the grid and slices of the budget; None when no grid holds a slice."""
        grids = [segment.shape.grid for segment in image]
        area = next(
            (grid.area for grid in self._grids if all(grid.admits(rows, columns) for _, rows, columns in grids)), None
        )
        budget = next((budget for budget in self._budgets if budget >= len(image)), None)
        return None if area is None or budget is None else (area, budget)

    @torch.inference_mode()
    def encode(self, image: Image) -> Tensor | None:
        """Tokens `[slices * Q, E]` on the device, overwritten by the next replay; None where no grid fits."""
        key = self.key(image)
        if key is None:
            return None
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, inputs, output = self._graphs[key]
        self._stock.fill(inputs, image)
        if graph is None:
            output = self._stock.forward(inputs, masked=True)
        else:
            graph.replay()
        return output[: len(image) * self._stock.adapter.sizes.queries]

    def _capture(self, area: int, budget: int) -> tuple[torch.cuda.CUDAGraph | None, dict[str, Tensor], Tensor]:
        inputs = self._stock.buffers(budget, area)
        self._stock.resampler.reserve(area)
        output = self._stock.forward(inputs, masked=True)
        if self._pool is None:
            return None, inputs, output
        torch.cuda.synchronize(self._stock.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = self._stock.forward(inputs, masked=True)
        return graph, inputs, output
