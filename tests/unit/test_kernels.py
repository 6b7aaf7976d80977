"""The twins of the kernels against plain torch, on the CPU; the GPU tests hold the kernels to these twins."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F

from encoder.kernels import dispatch
from encoder.kernels.attention import ragged_attention, ragged_cross_attention
from encoder.kernels.elementwise import patches_to_pixels
from encoder.kernels.hopper_attention import Boxes, num_stages, self_attention_source, shape_for, shared_bytes
from encoder.kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from encoder.kernels.triton_widths import split_width
from encoder.towers.packed_vit import pad_mlp

LENGTHS = [37, 1, 0, 64, 5]


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)


def nonempty(cu_seqlens: torch.Tensor) -> dict[int, tuple[int, int]]:
    """First and last offset of each segment that has rows."""
    bounds = enumerate(pairwise(cu_seqlens.tolist()))
    return {segment: (begin, end) for segment, (begin, end) in bounds if begin < end}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_heads: int, scale: float) -> torch.Tensor:
    """Rows `[N, E]` each, spelled out."""
    q_HNK, k_HNK, v_HNK = (x.reshape(len(x), num_heads, -1).transpose(0, 1) for x in (q, k, v))
    weights_HNN = (q_HNK @ k_HNK.transpose(1, 2) * scale).softmax(dim=-1)
    return (weights_HNN @ v_HNK).transpose(0, 1).reshape(len(q), -1)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_self_attention_stays_within_segments(scale: float | None) -> None:
    qkv = torch.randn(sum(LENGTHS) + 3, 3 * 48)
    qkv[sum(LENGTHS) :] = float("nan")
    out = torch.full((len(qkv), 48), float("nan"))
    cu_seqlens = offsets(LENGTHS)
    assert ragged_attention(qkv, cu_seqlens, num_heads=2, scale=scale, out=out) is out
    for begin, end in nonempty(cu_seqlens).values():
        q, k, v = qkv[begin:end].chunk(3, dim=1)
        torch.testing.assert_close(out[begin:end], attention(q, k, v, 2, scale or 24**-0.5))
    assert out[sum(LENGTHS) :].isnan().all()


def test_self_attention_reads_four_dimensions_alike() -> None:
    qkv, cu_seqlens = torch.randn(sum(LENGTHS), 3 * 48), offsets(LENGTHS)
    assert torch.equal(ragged_attention(qkv, cu_seqlens, 2), ragged_attention(qkv.view(-1, 3, 2, 24), cu_seqlens, 2))


@pytest.mark.parametrize("shared_queries", [True, False])
def test_cross_attention_stays_within_segments(shared_queries: bool) -> None:
    kv_P2E = torch.randn(sum(LENGTHS) + 3, 2 * 32)
    kv_P2E[sum(LENGTHS) :] = float("nan")
    k_PE, v_PE = kv_P2E.split(32, dim=1)
    q = torch.randn(4, 32) if shared_queries else torch.randn(len(LENGTHS), 4, 32)
    cu_seqlens = offsets(LENGTHS)
    out_SQE = ragged_cross_attention(q, k_PE, v_PE, cu_seqlens, num_heads=2).view(-1, 4, 32)
    for segment, (begin, end) in nonempty(cu_seqlens).items():
        queries = q if shared_queries else q[segment]
        wanted = attention(queries, k_PE[begin:end], v_PE[begin:end], num_heads=2, scale=0.25)
        torch.testing.assert_close(out_SQE[segment], wanted)
    assert not out_SQE[LENGTHS.index(0)].any()


def test_norms_equal_torch() -> None:
    x, weight, bias = torch.randn(7, 48), torch.randn(48), torch.randn(48)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-6), F.layer_norm(x, (48,), weight, bias, 1e-6))
    torch.testing.assert_close(layer_norm(x, weight, None, 1e-6), F.layer_norm(x, (48,), weight, None, 1e-6))
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (48,), weight, 1e-6))


def test_add_norms_return_the_sum_and_its_norm() -> None:
    x, delta, weight, bias, delta_bias = torch.randn(7, 48), torch.randn(7, 48), *torch.randn(3, 48)
    total, normed = add_layer_norm(x, delta, weight, bias, 1e-6, delta_bias_D=delta_bias)
    torch.testing.assert_close(total, x + delta + delta_bias)
    torch.testing.assert_close(normed, F.layer_norm(x + delta + delta_bias, (48,), weight, bias, 1e-6))
    total, normed = add_rms_norm(x, delta, weight, 1e-6)
    torch.testing.assert_close(total, x + delta)
    torch.testing.assert_close(normed, F.rms_norm(x + delta, (48,), weight, 1e-6))


def test_add_layer_norm_adds_both_parts_of_a_sum() -> None:
    x, parts, weight, bias, delta_bias = torch.randn(5, 32), torch.randn(2, 5, 32), *torch.randn(3, 32)
    total, normed = add_layer_norm(x, parts, weight, bias, 1e-6, delta_bias_D=delta_bias)
    assert torch.allclose(total, x + parts[0] + parts[1] + delta_bias, atol=1e-6)  # added in another order
    assert torch.allclose(normed, F.layer_norm(total, (32,), weight, bias, 1e-6), atol=1e-5)


@pytest.mark.parametrize(("width", "on_gpu"), [(4304, 4352), (4096, 4096), (96, 96), (2048, 2048), (3200, 3200)])
def test_mlp_widths_are_padded_to_whole_lines_where_that_is_little(width: int, on_gpu: int) -> None:
    assert pad_mlp(width, torch.device("cuda")) == on_gpu
    assert pad_mlp(width, torch.device("cpu")) == width


def test_add_layer_norm_gathers_rows_of_a_table() -> None:
    x, table, rows = torch.randn(5, 48), torch.randn(9, 48), torch.tensor([8, 0, 0, 3, 1])
    weight, bias = torch.randn(2, 48)
    total, normed = add_layer_norm(x, table, weight, bias, 1e-6, rows_P=rows)
    torch.testing.assert_close(total, x + table[rows])
    torch.testing.assert_close(normed, F.layer_norm(x + table[rows], (48,), weight, bias, 1e-6))


def test_norms_keep_the_dtype_and_sum_in_float32() -> None:
    x, delta = 100 * torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    total, normed = add_layer_norm(x, delta, torch.ones(64), torch.zeros(64), 1e-6)
    assert total.dtype == normed.dtype == torch.bfloat16
    exact = F.layer_norm(x.float() + delta.float(), (64,), eps=1e-6)
    assert torch.equal(normed, exact.bfloat16())


def test_patches_become_pixels_exactly() -> None:
    patches = torch.arange(256, dtype=torch.uint8).repeat(3, 2)[:, :300].contiguous()
    pixels = patches_to_pixels(patches)
    assert pixels.shape == (3, 304)
    assert pixels.dtype == torch.bfloat16
    assert torch.equal(pixels[:, :300].to(torch.int16) + 128, patches.to(torch.int16))
    assert not pixels[:, 300:].any()


@pytest.mark.parametrize(
    ("width", "head", "tail"),
    [
        (8, 16, 0),
        (64, 64, 0),
        (72, 64, 16),
        (80, 64, 16),
        (96, 64, 32),
        (112, 128, 0),
        (128, 128, 0),
        (1152, 1024, 128),
        (1280, 1024, 256),
        (3584, 4096, 0),
    ],
)
def test_widths_split_into_powers_of_two(width: int, head: int, tail: int) -> None:
    assert split_width(width) == {"HEAD": head, "TAIL": tail}


@pytest.mark.parametrize("head_width", range(16, 129, 8))
def test_hopper_kernel_fits_every_head_width(head_width: int) -> None:
    """Boxes cover the head, at least two blocks are in flight, and the registers suffice."""
    shape, boxes = shape_for(head_width), Boxes.of(head_width)
    assert min(head_width, 64) <= boxes.main <= 64
    assert head_width - 64 <= boxes.rest <= 64
    stages = num_stages(head_width, shape)
    assert stages >= 2
    assert shared_bytes(head_width, shape, stages) <= 227 * 1024
    producer, consumer = shape.registers
    assert 128 * producer + 128 * shape.consumers * consumer <= 65536
    assert f"m64n{head_width}k16" in self_attention_source(head_width, torch.bfloat16, torch.bfloat16, shape)


@pytest.mark.parametrize("is_there", [True, False])
def test_without_a_compiler_attention_is_left_to_triton(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def nvrtc() -> None:
        if not is_there:
            raise OSError("libnvrtc.so.13: cannot open shared object file")

    dispatch.cuda_compiles.cache_clear()
    monkeypatch.setattr(dispatch, "nvrtc", nvrtc)
    assert dispatch.cuda_compiles() is is_there
    dispatch.cuda_compiles.cache_clear()
