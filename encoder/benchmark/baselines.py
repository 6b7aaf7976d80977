"""What the engine is measured against: transformers' own tower, eagerly, and captured in vLLM's padded grids."""

# Shapes: B slices of a batch, L patches of a slice or grid, D tower width, E token width, Q queries.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from encoder.adapters.base import Segment
from encoder.adapters.layouts import VLLM, parse_layouts
from encoder.adapters.minicpmv import MiniCPMV
from encoder.adapters.minicpmv_positions import position_ids
from encoder.attention import dense_cross_attention
from encoder.towers.resampler import Resampler

Image = Sequence[Segment]


def transformers_tower(
    adapter: MiniCPMV, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Any:
    """transformers' Idefics2 vision transformer with the released weights; attention by SDPA."""
    from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
    from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

    config = Idefics2VisionConfig(
        hidden_size=adapter.width,
        intermediate_size=adapter.mlp_width,
        num_hidden_layers=adapter.num_layers,
        num_attention_heads=adapter.num_heads,
        image_size=adapter.table_side * adapter.patch_size,
        patch_size=adapter.patch_size,
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        tower: Any = Idefics2VisionTransformer(config)
    state = {name.removeprefix("vpm."): tensor for name, tensor in weights.items() if name.startswith("vpm.")}
    tower.load_state_dict(state, assign=True)
    return tower.to(device, dtype).eval()


class EagerLoop:
    """One image at a time, no graphs: equal slices in one forward of transformers' tower, then our resampler.

    The overview and the cuts are two forwards without a mask, so that SDPA takes its fastest kernel.
    """

    def __init__(self, adapter: MiniCPMV, tower: Any, resampler: Resampler, device: torch.device) -> None:
        self._adapter, self._tower, self._resampler, self._device = adapter, tower, resampler, device
        self._dtype = tower.dtype

    @torch.inference_mode()
    def encode(self, image: Image) -> Tensor:
        """Tokens `[slices * Q, E]` on the device."""
        return torch.cat([self._group(list(group)) for _, group in groupby(image, key=lambda s: s.shape.grid)])

    def _group(self, segments: list[Segment]) -> Tensor:
        _, rows, columns = segments[0].shape.grid
        patches_BLC = torch.stack([torch.from_numpy(segment.patches_PC) for segment in segments]).to(self._device)
        pixels = pixels_of(patches_BLC, rows, columns, self._adapter.patch_size, self._dtype)
        features_BLD = self._tower(pixels).last_hidden_state
        row, column = torch.meshgrid(
            torch.arange(rows, device=self._device), torch.arange(columns, device=self._device), indexing="ij"
        )
        count = len(segments)
        self._resampler.reserve(rows * columns)
        return self._resampler.forward(
            features_BLD.flatten(0, 1),
            row.flatten().repeat(count),
            column.flatten().repeat(count),
            lambda q, k, v: dense_cross_attention(q, k, v, count, self._resampler.num_heads, None),
        )


def pixels_of(patches_BLC: Tensor, rows: int, columns: int, side: int, dtype: torch.dtype) -> Tensor:
    """uint8 patch rows (y, x, channel) to normalised pictures `[B, 3, H, W]`."""
    picture = patches_BLC.view(-1, rows, columns, side, side, 3).permute(0, 5, 1, 3, 2, 4)
    pixels = picture.reshape(-1, 3, rows * side, columns * side).to(dtype)
    return pixels.mul_(2 / 255).sub_(1)


class PaddedGrids:
    """vLLM's design: all slices of an image in one graph, padded to the smallest of four grids that holds the widest.

    Slices are folded into the grid in sequence order and masked by an additive mask, as in vLLM pull request 42785;
    token budgets are powers of two of slices. A slice that no grid holds cannot be encoded here.
    """

    def __init__(
        self,
        adapter: MiniCPMV,
        tower: Any,
        resampler: Resampler,
        device: torch.device,
        max_slices: int = 16,
    ) -> None:
        self._adapter, self._tower, self._resampler, self._device = adapter, tower, resampler, device
        self._dtype = tower.dtype
        self._grids = [rectangle for rectangle in parse_layouts(VLLM).values() if rectangle is not None]
        self._budgets = [1 << power for power in range(max_slices.bit_length())]
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph | None, dict[str, Tensor], Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

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
        self._fill(inputs, image)
        if graph is None:
            output = self._forward(inputs)
        else:
            graph.replay()
        return output[: len(image) * self._adapter.queries]

    def _fill(self, inputs: dict[str, Tensor], image: Image) -> None:
        for name in ("mask", "ids", "rows", "columns"):
            inputs[name].fill_(torch.finfo(self._dtype).min if name == "mask" else 0)
        for index, segment in enumerate(image):
            _, rows, columns = segment.shape.grid
            length = rows * columns
            places = torch.arange(length, dtype=torch.int32)
            inputs["pixels"][index, :length].copy_(torch.from_numpy(segment.patches_PC))
            inputs["mask"][index, ..., :length] = 0
            inputs["ids"][index, :length].copy_(torch.from_numpy(position_ids(rows, columns, self._adapter.table_side)))
            inputs["rows"][index, :length].copy_(places // columns)
            inputs["columns"][index, :length].copy_(places % columns)

    def _capture(self, area: int, budget: int) -> tuple[torch.cuda.CUDAGraph | None, dict[str, Tensor], Tensor]:
        indices = {
            name: torch.zeros(budget, area, dtype=torch.int32, device=self._device)
            for name in ("ids", "rows", "columns")
        }
        inputs = indices | {
            "pixels": torch.zeros(
                budget, area, 3 * self._adapter.patch_size**2, dtype=torch.uint8, device=self._device
            ),
            "mask": torch.zeros(budget, 1, 1, area, dtype=self._dtype, device=self._device),
        }
        self._resampler.reserve(area)
        output = self._forward(inputs)
        if self._pool is None:
            return None, inputs, output
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = self._forward(inputs)
        return graph, inputs, output

    def _forward(self, inputs: dict[str, Tensor]) -> Tensor:
        budget, area, _ = inputs["pixels"].shape
        tower, mask = self._tower, inputs["mask"]
        pixels = pixels_of(inputs["pixels"].flatten(0, 1)[:, None], 1, 1, self._adapter.patch_size, self._dtype)
        x_BLD = tower.embeddings.patch_embedding(pixels).flatten(1).unflatten(0, (budget, area))
        x_BLD = x_BLD + tower.embeddings.position_embedding(inputs["ids"])
        encoded = tower.encoder(inputs_embeds=x_BLD, attention_mask=mask)
        features_BLD = tower.post_layernorm(encoded.last_hidden_state)
        heads = self._resampler.num_heads

        def attend(q_QE: Tensor, k_PE: Tensor, v_PE: Tensor) -> Tensor:
            k, v = (
                rows.unflatten(1, (heads, -1)).unflatten(0, (budget, area)).transpose(1, 2) for rows in (k_PE, v_PE)
            )
            q = q_QE.unflatten(1, (heads, -1)).transpose(0, 1).expand(budget, -1, -1, -1)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return out.transpose(1, 2).flatten(0, 1).flatten(1)

        return self._resampler.forward(
            features_BLD.flatten(0, 1), inputs["rows"].flatten(), inputs["columns"].flatten(), attend
        )
