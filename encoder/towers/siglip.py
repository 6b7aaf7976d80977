"""The SigLIP-shaped tower of MiniCPM-V, under its released names `vpm.*`."""

# Shapes: P patches, C numbers of a patch, D model width.

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.adapters.minicpmv_config import MiniCPMVSizes
from encoder.attention import SelfAttention
from encoder.kernels.elementwise import fold_pixels, patches_to_pixels
from encoder.kernels.norms import layer_norm
from encoder.towers.packed_vit import Block, Norm, pad_mlp, run_blocks
from encoder.towers.packed_vit_fp8 import Block8, quantise_blocks, run_blocks_8


def siglip_weight_shapes(sizes: MiniCPMVSizes) -> dict[str, tuple[int, ...]]:
    """Released names and shapes, every stored layer included."""
    width, mlp = sizes.width, sizes.mlp_width
    shapes: dict[str, tuple[int, ...]] = {
        "vpm.embeddings.patch_embedding.weight": (width, 3, sizes.patch_size, sizes.patch_size),
        "vpm.embeddings.patch_embedding.bias": (width,),
        "vpm.embeddings.position_embedding.weight": (sizes.table_side**2, width),
        "vpm.post_layernorm.weight": (width,),
        "vpm.post_layernorm.bias": (width,),
    }
    for index in range(sizes.num_layers):
        layer = f"vpm.encoder.layers.{index}"
        for norm in ("layer_norm1", "layer_norm2"):
            shapes |= {f"{layer}.{norm}.weight": (width,), f"{layer}.{norm}.bias": (width,)}
        linears = {f"self_attn.{name}_proj": (width, width) for name in ("q", "k", "v", "out")}
        linears |= {"mlp.fc1": (mlp, width), "mlp.fc2": (width, mlp)}
        for name, shape in linears.items():
            shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
    return shapes


class SiglipTower:
    """Patches to features, on one device and in one dtype."""

    def __init__(
        self,
        sizes: MiniCPMVSizes,
        weights: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_heads, self.head_width = sizes.num_heads, sizes.width // sizes.num_heads
        self.eps = sizes.layer_norm_eps

        def put(*names: str) -> Tensor:
            return torch.cat([weights[name] for name in names]).to(device, dtype)

        def norm(name: str) -> Norm:
            return Norm(weight=put(f"{name}.weight"), bias=put(f"{name}.bias"))

        mlp_padding = pad_mlp(sizes.mlp_width, device) - sizes.mlp_width
        patch = "vpm.embeddings.patch_embedding"
        weight_DLC, half = weights[f"{patch}.weight"].flatten(2).transpose(1, 2), (0.5, 0.5, 0.5)
        folded = fold_pixels(weight_DLC, weights[f"{patch}.bias"], mean=half, std=half)
        self.patch_weight, self.patch_bias = (tensor.to(device, dtype) for tensor in folded)
        self.positions = put("vpm.embeddings.position_embedding.weight")
        self.post_norm = norm("vpm.post_layernorm")
        self.blocks = [
            Block(
                norm1=norm(f"{layer}.layer_norm1"),
                qkv_weight=put(*(f"{layer}.self_attn.{name}_proj.weight" for name in "qkv")),
                qkv_bias=put(*(f"{layer}.self_attn.{name}_proj.bias" for name in "qkv")),
                out_weight=put(f"{layer}.self_attn.out_proj.weight"),
                out_bias=put(f"{layer}.self_attn.out_proj.bias"),
                norm2=norm(f"{layer}.layer_norm2"),
                fc1_weight=F.pad(put(f"{layer}.mlp.fc1.weight"), (0, 0, 0, mlp_padding)),
                fc1_bias=F.pad(put(f"{layer}.mlp.fc1.bias"), (0, mlp_padding)),
                fc2_weight=F.pad(put(f"{layer}.mlp.fc2.weight"), (0, mlp_padding)),
                fc2_bias=put(f"{layer}.mlp.fc2.bias"),
            )
            for layer in map("vpm.encoder.layers.{}".format, range(sizes.num_layers - sizes.drop_last_layer))
        ]
        self._blocks_8: list[Block8] | None = None

    def quantise(self, pixels_PC: Tensor, position_ids_P: Tensor, attend: SelfAttention) -> Tensor:
        """Turn the GEMMs of the layers to fp8, calibrated on these patches; their features `[P, D]`."""
        x_PD = self._embed(pixels_PC) + self.positions[position_ids_P]
        self._blocks_8, x_PD = quantise_blocks(x_PD, self.blocks, self.eps, attend)
        self.blocks = []
        return layer_norm(x_PD, self.post_norm.weight, self.post_norm.bias, self.eps)

    def forward(self, pixels_PC: Tensor, position_ids_P: Tensor, attend: SelfAttention) -> Tensor:
        """uint8 patch rows in the order (y, x, channel) to features `[P, D]`."""
        x_PD = self._embed(pixels_PC)
        if self._blocks_8 is not None:
            return run_blocks_8(x_PD, self.positions, position_ids_P, self._blocks_8, self.post_norm, self.eps, attend)
        return run_blocks(x_PD, self.positions, position_ids_P, self.blocks, self.post_norm, self.eps, attend)

    def _embed(self, pixels_PC: Tensor) -> Tensor:
        x_PC = patches_to_pixels(pixels_PC, width=self.patch_weight.shape[1], dtype=self.patch_weight.dtype)
        return F.linear(x_PC, self.patch_weight, self.patch_bias)
