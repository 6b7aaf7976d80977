"""uint8 patches to the GEMM's input on the device.

Normalisation `(u8 / 255 - mean) / std` is affine, so `fold_pixels` moves it into the patch embedding: the kernel only
centres the bytes, `u8 - 128`, an integer of at most 8 bits and so exact in bfloat16 and float16.
"""

# Shapes: P patches, C bytes of one patch (channels x patch area), W columns of the output, C <= W; D model width, L
# pixels of a patch.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from encoder.kernels.dispatch import runs_on_triton

CENTRE = 128


def patches_to_pixels(
    bytes_PC: torch.Tensor,
    *,
    width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """uint8 patches `[P, C]` as `u8 - 128` in `dtype`, zeros in columns C and up; `[P, width]`.

    `width` is C rounded up to a multiple of 8 by default (588 becomes 592: rows of whole 16 bytes, as the GEMM wants).
    """
    num_patches, num_bytes = bytes_PC.shape
    width = -(-num_bytes // 8) * 8 if width is None else width
    assert bytes_PC.dtype == torch.uint8
    assert bytes_PC.is_contiguous()
    assert width >= num_bytes
    if out is None:
        out = torch.empty(num_patches, width, dtype=dtype, device=bytes_PC.device)
    assert out.shape == (num_patches, width)
    assert out.is_contiguous()
    if runs_on_triton(bytes_PC):
        from encoder.kernels.triton_elementwise import launch_patches_to_pixels

        return launch_patches_to_pixels(bytes_PC, out)
    return out.copy_(patches_to_pixels_reference(bytes_PC, width, out.dtype))


def patches_to_pixels_reference(bytes_PC: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    pixels_PW = torch.zeros(len(bytes_PC), width, dtype=dtype, device=bytes_PC.device)
    pixels_PW[:, : bytes_PC.shape[1]] = bytes_PC.to(torch.int16) - CENTRE
    return pixels_PW


def fold_pixels(
    weight_DLC: torch.Tensor, bias_D: torch.Tensor | None, mean: Sequence[float], std: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A patch embedding's weight and bias with the normalisation folded in, for rows of `u8 - 128`; on their device.

    (v / 255 - mean) / std = (v - 128) / (255 std) + (128 / 255 - mean) / std, channel by channel. float64 keeps what is
    folded as exact as what is stored.

    Args:
        weight_DLC: for pixels in the order of the rows, each of its channels.

    Returns:
        Weight `[D, W]` with zeros in the columns that pad rows to whole 16 bytes, and bias `[D]`, both float64.
    """
    wide_DLC = weight_DLC.double()
    mean_C, std_C = (torch.tensor(values, dtype=torch.float64, device=wide_DLC.device) for values in (mean, std))
    shift_D = (wide_DLC * ((CENTRE / 255 - mean_C) / std_C)).sum((1, 2))
    folded_DW = (wide_DLC / (255 * std_C)).flatten(1)
    folded_DW = pad(folded_DW, (0, -folded_DW.shape[1] % 8))
    return folded_DW, shift_D if bias_D is None else shift_D + bias_D.double()
