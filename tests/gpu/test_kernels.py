"""Every kernel against its twin in float32, on the GPU."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from encoder.kernels.attention import (
    ragged_attention,
    ragged_attention_reference,
    ragged_cross_attention,
    ragged_cross_attention_reference,
)
from encoder.kernels.elementwise import patches_to_pixels, patches_to_pixels_reference
from encoder.kernels.norms import (
    add_layer_norm,
    add_layer_norm_reference,
    add_rms_norm,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from encoder.towers.packed_vit import linear_in_parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_PAD_ROWS = 77
MIXES = {
    "one slice": [1032],
    "three slices": [1036, 1020, 1036],
    "nine slices": [1032] + [1020] * 8,
    "sixteen slices": [1032, 1020, 1036, 1014] * 4,
    "whole blocks": [1024, 768, 384, 128],
    "every kind of rest": [1, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 255, 257],
    "length one": [1] * 40,
    "empty segments": [0, 300, 0, 0, 517, 0],
    "very long": [5000, 7],
    "many segments": [97] * 150,
}


def offsets(lengths: list[int], num_segments: int | None = None) -> torch.Tensor:
    """`cu_seqlens` on the device, the last offset repeated up to `num_segments`."""
    ends = list(accumulate(lengths, initial=0))
    ends += [ends[-1]] * ((num_segments or len(lengths)) - len(lengths))
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def random_rows(num_rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(num_rows, width, device="cuda", dtype=dtype)


def poisoned_qkv(lengths: list[int], width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random rows, and after them pad rows of NaN."""
    qkv = random_rows(sum(lengths) + NUM_PAD_ROWS, 3 * width, dtype)
    qkv[sum(lengths) :] = float("nan")
    return qkv


def assert_close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 5e-3) -> None:
    """By the relative norm of the difference, of the whole and of the worst row; NaN never passes."""
    difference, wanted = got.float() - wanted.float(), wanted.float()
    assert float(difference.norm() / wanted.norm()) < tolerance
    row_error = difference.norm(dim=-1) / (wanted.norm(dim=-1) + 1e-3 * wanted.norm(dim=-1).mean())
    assert float(row_error.max()) < 6 * tolerance


def check_self_attention(
    lengths: list[int], head_width: int, num_heads: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    qkv = poisoned_qkv(lengths, num_heads * head_width, dtype)
    cu_seqlens, num_rows = offsets(lengths), sum(lengths)
    out = torch.full((len(qkv), num_heads * head_width), float("nan"), device="cuda", dtype=dtype)
    assert ragged_attention(qkv, cu_seqlens, num_heads, out=out) is out
    wanted = ragged_attention_reference(qkv.float(), cu_seqlens, num_heads)
    assert_close(out[:num_rows], wanted[:num_rows])


@pytest.mark.parametrize("mix", MIXES)
def test_self_attention_equals_float32(mix: str) -> None:
    check_self_attention(MIXES[mix], head_width=72, num_heads=16)


@pytest.mark.parametrize("head_width", [16, 24, 32, 40, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128])
def test_self_attention_of_every_head_width(head_width: int) -> None:
    check_self_attention([1032, 1, 128, 130, 500], head_width, num_heads=4)


@pytest.mark.parametrize("head_width", [64, 72, 128])
def test_self_attention_in_float16(head_width: int) -> None:
    check_self_attention([1032, 200], head_width, num_heads=3, dtype=torch.float16)


@pytest.mark.parametrize("head_width", [16, 40, 64, 72, 80, 96, 128])
def test_triton_self_attention_equals_float32(head_width: int) -> None:
    from encoder.kernels.triton_attention import launch_self_attention

    lengths = [1032, 1, 128, 130, 0, 500, 160, 144]
    qkv, cu_seqlens = poisoned_qkv(lengths, 4 * head_width), offsets(lengths)
    out = torch.full((len(qkv), 4 * head_width), float("nan"), device="cuda", dtype=qkv.dtype)
    launch_self_attention(qkv, cu_seqlens, 4, head_width**-0.5, out)
    wanted = ragged_attention_reference(qkv.float(), cu_seqlens, 4)
    assert_close(out[: sum(lengths)], wanted[: sum(lengths)])


def test_self_attention_takes_large_scores_and_a_scale() -> None:
    qkv, cu_seqlens = 20 * random_rows(1032, 3 * 1152), offsets([1032])
    wanted = ragged_attention_reference(qkv.float(), cu_seqlens, 16, scale=0.5)
    assert_close(ragged_attention(qkv, cu_seqlens, 16, scale=0.5), wanted, tolerance=1e-2)


def test_one_graph_serves_any_boundaries() -> None:
    mixes = [
        [1032, 1020, 1036, 1014],
        [1014, 1036, 1020, 1032],
        [4102],
        [1] * 6 + [2048, 2048],
        [128] * 32,
        [0, 700, 1194],
    ]
    num_rows, num_segments = 4200, 32
    qkv, cu_seqlens = random_rows(num_rows, 3 * 1152), offsets(mixes[0], num_segments)
    ragged_attention(qkv, cu_seqlens, 16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ragged_attention(qkv, cu_seqlens, 16)
    for lengths in mixes:
        used = sum(lengths)
        qkv.copy_(random_rows(num_rows, 3 * 1152))
        qkv[used:] = float("nan")
        out.fill_(float("nan"))
        cu_seqlens.copy_(offsets(lengths, num_segments))
        graph.replay()
        wanted = ragged_attention_reference(qkv.float(), cu_seqlens, 16)
        assert_close(out[:used], wanted[:used])


def test_self_attention_repeats_bit_for_bit() -> None:
    lengths = MIXES["sixteen slices"]
    qkv, cu_seqlens = random_rows(sum(lengths), 3 * 1152), offsets(lengths)
    first = ragged_attention(qkv, cu_seqlens, 16)
    for _ in range(20):
        assert torch.equal(ragged_attention(qkv, cu_seqlens, 16), first)


@pytest.mark.parametrize("num_queries", [64, 96, 5])
@pytest.mark.parametrize("lengths", [[1032], [1032, 1014, 0, 1], [1032] * 16], ids=len)
@pytest.mark.parametrize("shared_queries", [True, False])
def test_cross_attention_equals_float32(num_queries: int, lengths: list[int], shared_queries: bool) -> None:
    num_heads, width = 28, 3584
    kv_P2E = random_rows(sum(lengths) + NUM_PAD_ROWS, 2 * width)
    kv_P2E[sum(lengths) :] = float("nan")
    k_PE, v_PE = kv_P2E.split(width, dim=1)
    q = torch.randn(len(lengths), num_queries, width, device="cuda", dtype=torch.bfloat16)
    q = q[0].clone() if shared_queries else q
    cu_seqlens = offsets(lengths)
    out = torch.full((len(lengths) * num_queries, width), float("nan"), device="cuda", dtype=q.dtype)
    ragged_cross_attention(q, k_PE, v_PE, cu_seqlens, num_heads, out=out)
    wanted = ragged_cross_attention_reference(q.float(), k_PE.float(), v_PE.float(), cu_seqlens, num_heads)
    assert_close(out, wanted)


@pytest.mark.parametrize("head_width", [64, 72, 80])
def test_one_query_pools_the_rows_of_each_segment(head_width: int) -> None:
    lengths, width = [256, 1, 240, 0], 16 * head_width
    k_PE, v_PE = random_rows(sum(lengths) + NUM_PAD_ROWS, width), random_rows(sum(lengths) + NUM_PAD_ROWS, width)
    query, cu_seqlens = random_rows(1, width), offsets(lengths)
    wanted = ragged_cross_attention_reference(query.float(), k_PE.float(), v_PE.float(), cu_seqlens, 16)
    assert_close(ragged_cross_attention(query, k_PE, v_PE, cu_seqlens, 16), wanted)


@pytest.mark.parametrize("width", [1152, 1024, 1280, 3584, 100])
@pytest.mark.parametrize("num_rows", [0, 1, 1037])
def test_norms_equal_float32(width: int, num_rows: int) -> None:
    x = 3 * random_rows(num_rows, width) + 1
    weight, bias = random_rows(2, width)
    if num_rows == 0:
        assert layer_norm(x, weight, bias, 1e-6).shape == x.shape
        return
    assert_close(layer_norm(x, weight, bias, 1e-6), layer_norm_reference(x.float(), weight, bias, 1e-6))
    assert_close(rms_norm(x, weight, 1e-6), rms_norm_reference(x.float(), weight, 1e-6))


@pytest.mark.parametrize("with_delta_bias", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
def test_add_layer_norm_equals_float32(with_delta_bias: bool, gathered: bool) -> None:
    x, weight, bias = random_rows(1037, 1152), random_rows(1, 1152)[0], random_rows(1, 1152)[0]
    delta = random_rows(70 if gathered else 1037, 1152)
    options = {
        "delta_bias_D": random_rows(1, 1152)[0] if with_delta_bias else None,
        "rows_P": torch.randint(0, 70, (1037,), device="cuda") if gathered else None,
    }
    got = add_layer_norm(x, delta, weight, bias, 1e-6, **options)
    wanted = add_layer_norm_reference(x.float(), delta.float(), weight, bias, 1e-6, **options)
    for got_PD, wanted_PD in zip(got, wanted, strict=True):
        assert_close(got_PD, wanted_PD)


@pytest.mark.parametrize("width", [1152, 1024])
def test_add_layer_norm_of_two_parts_equals_float32(width: int) -> None:
    x, weight, bias, delta_bias = random_rows(1037, width), *random_rows(3, width)
    parts = random_rows(2 * 1037, width).view(2, 1037, width)
    got = add_layer_norm(x, parts, weight, bias, 1e-6, delta_bias_D=delta_bias)
    total = x.float() + parts[0].float() + parts[1].float() + delta_bias.float()
    assert_close(got[0], total)
    assert_close(got[1], layer_norm_reference(total, weight, bias, 1e-6))


@pytest.mark.parametrize("num_rows", [16, 1056, 1280, 1281])
def test_a_linear_layer_in_parts_equals_float32(num_rows: int) -> None:
    x, weight = random_rows(num_rows, 4352), random_rows(1152, 4352)
    out = linear_in_parts(x, weight)
    assert out.dim() == (3 if num_rows <= 1280 else 2)
    assert_close(out.float().sum(0) if out.dim() == 3 else out, x.float() @ weight.float().t())


def test_add_rms_norm_equals_float32() -> None:
    x, delta, weight = random_rows(300, 1280), random_rows(300, 1280), random_rows(1, 1280)[0]
    total, normed = add_rms_norm(x, delta, weight, 1e-6)
    assert_close(total, x.float() + delta.float())
    assert_close(normed, rms_norm_reference(x.float() + delta.float(), weight, 1e-6))


def test_patches_become_pixels_exactly() -> None:
    patches = torch.randint(0, 256, (1037, 588), dtype=torch.uint8, device="cuda")
    out = torch.full((1037, 592), float("nan"), device="cuda", dtype=torch.bfloat16)
    patches_to_pixels(patches, out=out)
    assert torch.equal(out, patches_to_pixels_reference(patches, 592, torch.bfloat16))
    assert torch.equal(out[:, :588].to(torch.int16) + 128, patches.to(torch.int16))
    assert not out[:, 588:].any()
