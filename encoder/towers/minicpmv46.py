"""How MiniCPM-V 4.6's tower shrinks four to one after its seventh layer, without finding windows image by image."""

# Shapes: P patches, D tower width, W windows of four patches.

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def merge_windows(merger: Any, x_PD: Tensor) -> Tensor:
    """Patches attend to the four of their window, which then become one row: `[W, D]`."""
    attention = merger.self_attn
    normed_W4D = merger.layer_norm1(x_PD).unflatten(0, (-1, 4))
    q, k, v = (
        projection(normed_W4D).unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    attended_W4D = scaled_dot_product_attention(q, k, v, scale=attention.scaling).transpose(1, 2).flatten(2)
    x_W4D = x_PD.unflatten(0, (-1, 4)) + attention.out_proj(attended_W4D)
    merged_WD: Tensor = merger.linear_2(merger.act(merger.linear_1(merger.pre_norm(x_W4D.flatten(1)))))
    merged_WD = merged_WD + x_W4D.mean(1)
    return merged_WD
