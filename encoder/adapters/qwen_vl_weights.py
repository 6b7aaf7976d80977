"""Names and shapes of Qwen-VL's vision tensors, as released. Free of torch."""

from __future__ import annotations

from encoder.adapters.qwen_vl_config import QwenSizes

PREFIX = {"2": "visual", "2.5": "visual", "3": "model.visual"}
MLP_NAMES = {
    "2": ("fc1", "fc2"),
    "2.5": ("gate_proj", "up_proj", "down_proj"),
    "3": ("linear_fc1", "linear_fc2"),
}
MERGER_NAMES = {
    "2": ("ln_q", "mlp.0", "mlp.2"),
    "2.5": ("ln_q", "mlp.0", "mlp.2"),
    "3": ("norm", "linear_fc1", "linear_fc2"),
}
"""Norm, first and second projection."""

Shapes = dict[str, tuple[int, ...]]


def qwen_weight_shapes(sizes: QwenSizes) -> Shapes:
    """Every tensor of the vision part."""
    generation, width = sizes.generation, sizes.width
    merged = width * sizes.patches_per_token
    shapes: Shapes = {
        "patch_embed.proj.weight": (width, 3, sizes.temporal_patch_size, sizes.patch_size, sizes.patch_size)
    }
    if generation == "3":
        shapes["patch_embed.proj.bias"] = (width,)
        shapes["pos_embed.weight"] = (sizes.table_side**2, width)
    for index in range(sizes.num_layers):
        layer = f"blocks.{index}"
        shapes |= _norm(f"{layer}.norm1", width, generation) | _norm(f"{layer}.norm2", width, generation)
        shapes |= _linear(f"{layer}.attn.qkv", 3 * width, width) | _linear(f"{layer}.attn.proj", width, width)
        *up, down = (f"{layer}.mlp.{name}" for name in MLP_NAMES[generation])
        for name in up:
            shapes |= _linear(name, sizes.mlp_width, width)
        shapes |= _linear(down, width, sizes.mlp_width)
    mergers = {"merger": width} | {
        f"deepstack_merger_list.{level}": merged for level in range(len(sizes.deepstack_layers))
    }
    norm, first, second = MERGER_NAMES[generation]
    for merger, norm_width in mergers.items():
        shapes |= _norm(f"{merger}.{norm}", norm_width, generation)
        shapes |= _linear(f"{merger}.{first}", merged, merged) | _linear(
            f"{merger}.{second}", sizes.token_width, merged
        )
    return {f"{PREFIX[generation]}.{name}": shape for name, shape in shapes.items()}


def _norm(name: str, width: int, generation: str) -> Shapes:
    """LayerNorm, or the RMSNorm of 2.5."""
    shapes: Shapes = {f"{name}.weight": (width,)}
    return shapes if generation == "2.5" else shapes | {f"{name}.bias": (width,)}


def _linear(name: str, fan_out: int, fan_in: int) -> Shapes:
    return {f"{name}.weight": (fan_out, fan_in), f"{name}.bias": (fan_out,)}
