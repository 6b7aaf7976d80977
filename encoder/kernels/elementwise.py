"""uint8 patches to the GEMM's input on the device.

Normalisation `(u8 / 255 - mean) / std` is affine, so a caller folds it into the patch embedding: the kernel only
centres the bytes, `u8 - 128`, an integer of at most 8 bits and so exact in bfloat16 and float16.
"""

# Shapes: P patches, C bytes of one patch (channels x patch area), W columns of the output, C <= W.

from __future__ import annotations

import torch

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
