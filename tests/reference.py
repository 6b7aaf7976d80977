"""What the released MiniCPM-V models compute, written with other people's modules, slice by slice in float32.

The tower is transformers' Idefics2 vision transformer, which has the released parameter names and sizes; the resampler
is `torch.nn.MultiheadAttention`, as in the released code. Pixels are prepared here from the image, not by encpool.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

EPS = 1e-6


class ReferenceMiniCPMV:
    """The encoder of a released-layout snapshot."""

    def __init__(self, snapshot: Path) -> None:
        config = json.loads((snapshot / "config.json").read_text())
        self.one_row = str(config["version"]) == "2.5"
        self.weights: dict[str, torch.Tensor] = {}
        for shard in sorted(snapshot.glob("*.safetensors")):
            self.weights |= {name: tensor.float() for name, tensor in load_file(shard).items()}
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        vision = {key: config["vision_config"][key] for key in (*sizes, "image_size", "patch_size")}
        self.tower = Idefics2VisionTransformer(Idefics2VisionConfig(**vision, attn_implementation="sdpa")).eval()
        prefix = "vpm."
        self.tower.load_state_dict(
            {name.removeprefix(prefix): tensor for name, tensor in self.weights.items() if name.startswith(prefix)}
        )
        width = config["hidden_size"]
        self.attention = torch.nn.MultiheadAttention(width, width // 128, batch_first=True).eval()
        prefix = "resampler.attn."
        self.attention.load_state_dict(
            {name.removeprefix(prefix): tensor for name, tensor in self.weights.items() if name.startswith(prefix)}
        )

    @torch.inference_mode()
    def encode_slice(self, picture: Image.Image) -> torch.Tensor:
        """Tokens `[Q, E]` of one resized slice."""
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
        pixels = (pixels - 0.5) / 0.5
        rows, columns = pixels.shape[1] // 14, pixels.shape[2] // 14
        if self.one_row:
            strip = pixels.unflatten(1, (rows, 14)).unflatten(3, (columns, 14))  # c, rows, y, columns, x
            pixels = strip.permute(0, 2, 1, 3, 4).reshape(3, 14, 14 * rows * columns)
        features = self.tower(pixels[None]).last_hidden_state[0]
        return self.resample(features, rows, columns)

    def resample(self, features: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The released resampler on the features of one slice."""
        norm = {
            name: (self.weights[f"resampler.{name}.weight"], self.weights[f"resampler.{name}.bias"])
            for name in ("ln_q", "ln_kv", "ln_post")
        }
        width = self.weights["resampler.query"].shape[1]
        y = F.layer_norm(F.linear(features, self.weights["resampler.kv_proj.weight"]), (width,), *norm["ln_kv"], EPS)
        queries = F.layer_norm(self.weights["resampler.query"], (width,), *norm["ln_q"], EPS)
        keys = y + torch.from_numpy(sincos_2d(width, rows, columns))
        out, _ = self.attention(queries[None], keys[None], y[None], need_weights=False)
        return F.layer_norm(out[0], (width,), *norm["ln_post"], EPS) @ self.weights["resampler.proj"]


def sincos_2d(width: int, rows: int, columns: int) -> np.ndarray:
    """Position codes `[rows * columns, width]` as the released code makes them: columns in the first half."""
    omega = 1.0 / 10000 ** (np.arange(width // 4, dtype=np.float32) / (width / 4.0))

    def encode(coordinate: np.ndarray) -> np.ndarray:
        angles = np.einsum("p,k->pk", coordinate.ravel().astype(np.float32), omega)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    row, column = np.mgrid[:rows, :columns]
    return np.concatenate([encode(column), encode(row)], axis=1).astype(np.float32)
