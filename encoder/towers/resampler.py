"""MiniCPM-V's resampler: Q learned queries read the patches of one slice by a single cross-attention.

Everything that does not depend on the image is computed at load: the projected queries, and the key projections of
the sine-cosine positions. Positions are P = [column code, row code], so the key projection of a patch splits into
W_k y + W_k P = W_k y + C[column] + R[row], two small tables that are gathered.
"""

# Shapes: P patches, D tower width, E token width, Q queries a slice, S slices, N rows of a table.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.kernels.fp8 import Linear8, layer_norm_8
from encoder.kernels.gather import add_table_rows_
from encoder.kernels.norms import layer_norm
from encoder.towers.packed_vit import Norm
from encoder.towers.packed_vit_fp8 import Seen, quantise_linears

EPS = 1e-6
HEAD_WIDTH = 128


def resampler_weight_shapes(width: int, queries: int, tower_width: int) -> dict[str, tuple[int, ...]]:
    """Released names and shapes."""
    shapes: dict[str, tuple[int, ...]] = {
        "resampler.query": (queries, width),
        "resampler.kv_proj.weight": (width, tower_width),
        "resampler.attn.in_proj_weight": (3 * width, width),
        "resampler.attn.in_proj_bias": (3 * width,),
        "resampler.attn.out_proj.weight": (width, width),
        "resampler.attn.out_proj.bias": (width,),
        "resampler.proj": (width, width),
    }
    for norm in ("ln_q", "ln_kv", "ln_post"):
        shapes |= {f"resampler.{norm}.weight": (width,), f"resampler.{norm}.bias": (width,)}
    return shapes


class Resampler:
    """Features of packed patches to tokens, on one device and in one dtype."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        named = {name.removeprefix("resampler."): tensor for name, tensor in weights.items()}
        width = named["query"].shape[1]
        self.num_heads = width // HEAD_WIDTH

        def put(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype).contiguous()

        weight_q, weight_k, weight_v = named["attn.in_proj_weight"].float().chunk(3)
        bias_q, bias_k, bias_v = named["attn.in_proj_bias"].float().chunk(3)
        query = F.layer_norm(
            named["query"].float(), (width,), named["ln_q.weight"].float(), named["ln_q.bias"].float(), EPS
        )
        self.query_QE = put(F.linear(query, weight_q, bias_q))
        self.kv_proj = put(named["kv_proj.weight"])
        self.ln_kv = put(named["ln_kv.weight"]), put(named["ln_kv.bias"])
        self.kv_weight = put(torch.cat([weight_k, weight_v]))
        self.kv_bias = put(torch.cat([bias_k, bias_v]))
        self.out_proj = put(named["attn.out_proj.weight"]), put(named["attn.out_proj.bias"])
        self.ln_post = put(named["ln_post.weight"]), put(named["ln_post.bias"])
        self.proj = put(named["proj"].t())  # stored for `x @ proj`
        # Codes of a coordinate times their half of W_k, float32 until the sum is rounded once.
        half = width // 2
        self._column_weight = weight_k[:, :half].to(device)
        self._row_weight = weight_k[:, half:].to(device)
        self._dtype = dtype
        self._key_tables: list[tuple[Tensor, Tensor]] = []  # of columns and of rows, `[N, E]`; the last is in use
        self._kv_8: tuple[Norm, Linear8] | None = None

    def reserve(self, num_coordinates: int) -> None:
        """Make the tables hold coordinates below `num_coordinates`. Not inside a capture."""
        if self._key_tables and num_coordinates <= len(self._key_tables[-1][0]):
            return
        size = 1 << (num_coordinates - 1).bit_length()
        codes = coordinate_codes(size, self._column_weight.shape[1], self._column_weight.device)
        # Smaller tables stay: graphs that were captured with them still read them.
        self._key_tables.append(
            (
                F.linear(codes, self._column_weight).to(self._dtype),
                F.linear(codes, self._row_weight).to(self._dtype),
            )
        )

    def quantise(self, features_PD: Tensor) -> None:
        """Turn the projection to keys and values to fp8, calibrated on these features."""
        seen = Seen.of(layer_norm(F.linear(features_PD, self.kv_proj), *self.ln_kv, EPS), covariance=False)
        norm, seen = seen.centred(Norm(weight=self.ln_kv[0], bias=self.ln_kv[1]))
        linear = quantise_linears([self.kv_weight], [seen])[0]
        self._kv_8 = norm, replace(linear, bias_N=seen.bias(self.kv_bias, self.kv_weight))
        del self.kv_weight

    def forward(
        self,
        features_PD: Tensor,
        rows_P: Tensor,
        columns_P: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        frames: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Features to tokens `[S * Q, E]`. `attend(queries, keys, values)` keeps to each slice's own patches.

        `frames` are the times of frames `[F]`, below 0 for none, and the frame of each patch `[P]`.
        """
        k_PE, v_PE = self._keys_and_values(F.linear(features_PD, self.kv_proj)).chunk(2, dim=1)
        column_keys, row_keys = self._key_tables[-1]
        add_table_rows_(k_PE, column_keys, columns_P, row_keys, rows_P)
        if frames is not None:
            times_F, frame_P = frames
            k_PE += self._time_keys(times_F)[frame_P]
        tokens = F.linear(attend(self.query_QE, k_PE, v_PE), *self.out_proj)
        return F.linear(layer_norm(tokens, *self.ln_post, EPS), self.proj)

    def _time_keys(self, times_F: Tensor) -> Tensor:
        """Key projections of the frames' times, `[F, E]`: all of W_k, for a time's code spans the whole width."""
        codes_FE = codes_of(times_F, 2 * self._column_weight.shape[1]) * (times_F >= 0)[:, None]
        first_FH, second_FH = codes_FE.chunk(2, dim=1)
        keys_FE = F.linear(first_FH, self._column_weight) + F.linear(second_FH, self._row_weight)
        return keys_FE.to(self._dtype)

    def _keys_and_values(self, x_PE: Tensor) -> Tensor:
        if self._kv_8 is None:
            return F.linear(layer_norm(x_PE, *self.ln_kv, EPS), self.kv_weight, self.kv_bias)
        norm, linear = self._kv_8
        ones_P1 = torch.ones(len(x_PE), 1, device=x_PE.device)
        return linear(layer_norm_8(x_PE, norm.weight, norm.bias, EPS), ones_P1)


def coordinate_codes(num_coordinates: int, width: int, device: torch.device) -> Tensor:
    """Sine-cosine code of each coordinate, float32 `[N, width]`: `width / 2` sines, then as many cosines."""
    return codes_of(torch.arange(num_coordinates), width).to(device)


def codes_of(coordinates_N: Tensor, width: int) -> Tensor:
    """The codes of these coordinates, on their device."""
    exponents = torch.arange(width // 2, dtype=torch.float64, device=coordinates_N.device) / (width // 2)
    angles = coordinates_N.float()[:, None] * (1.0 / 10_000**exponents).float()
    return torch.cat([angles.sin(), angles.cos()], dim=1)
