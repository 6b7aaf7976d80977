"""Compiles and launches `hopper_attention.cu` (compute capability 9.0)."""

# Shapes: P rows (patches), S segments, E = heads x head width.

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from encoder.kernels.nvrtc import Kernel, TensorMap, compile_kernel, encode_tensor_map

SOURCE = Path(__file__).with_name("hopper_attention.cu")
LOG2_E = 1.4426950408889634
SHARED_LIMIT = 227 * 1024


class Shape(NamedTuple):
    """How one multiprocessor works: consumer warpgroups of 64 queries each, and keys a block (64 or 128)."""

    consumers: int
    keys: int

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def registers(self) -> tuple[int, int]:
        """A thread's, of producer and consumers; together they fill the register file."""
        return {1: (56, 256), 2: (40, 232), 3: (32, 160)}[self.consumers]


def shape_for(head_width: int) -> Shape:
    """Three consumers where scores, weights and output of 64 queries fit 160 registers a thread."""
    return Shape(consumers=3, keys=128) if head_width <= 72 else Shape(consumers=2, keys=128)


class Boxes(NamedTuple):
    """Columns of the copy engine's boxes: a head's first 64, and what remains, each a power of two from 16 to 64."""

    main: int
    rest: int

    @classmethod
    def of(cls, head_width: int) -> Boxes:
        main, rest = min(head_width, 64), max(head_width - 64, 0)
        return cls(*(max(16, 1 << (width - 1).bit_length()) if width else 0 for width in (main, rest)))


def launch_self_attention(
    qkv_P3E: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_heads: int,
    scale: float,
    out_PE: torch.Tensor,
    shape: Shape | None = None,
    mean_E: torch.Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """`out_PE` in the dtype of `qkv_P3E`, or e4m3: then `(out - mean) * factor` is what is rounded."""
    num_rows, width = out_PE.shape
    num_segments = cu_seqlens.shape[0] - 1
    if num_rows == 0 or num_segments == 0:
        return
    head_width = width // num_heads
    shape = shape or shape_for(head_width)
    assert (mean_E is not None) == (out_PE.dtype == torch.float8_e4m3fn)
    kernel = self_attention_kernel(out_PE.device.index, head_width, qkv_P3E.dtype, out_PE.dtype, shape)
    main, rest = Boxes.of(head_width)
    main_map, rest_map, v_map = (qkv_map(qkv_P3E, head_width, columns) for columns in (main, rest or 64, 64))
    max_tiles = (num_rows // (64 * shape.consumers) + num_segments) * num_heads
    multiprocessors = torch.cuda.get_device_properties(out_PE.device).multi_processor_count
    kernel.launch(
        min(max_tiles, multiprocessors), shape.threads,
        main_map, rest_map, v_map, cu_seqlens, out_PE, num_segments, num_heads, scale * LOG2_E,
        cu_seqlens if mean_E is None else mean_E, factor,
    )  # fmt: skip


def qkv_map(qkv_P3E: torch.Tensor, head_width: int, columns: int) -> TensorMap:
    """`[P, 3 x heads, head width]` in boxes of 64 rows; columns beyond it are zeros, not the next head's."""
    num_rows, width = qkv_P3E.shape
    size = qkv_P3E.element_size()
    return encode_tensor_map(
        qkv_P3E.data_ptr(),
        qkv_P3E.dtype,
        sizes=(head_width, width // head_width, num_rows),
        strides_bytes=(head_width * size, width * size),
        box=(columns, 1, 64),
    )


@functools.cache
def self_attention_kernel(
    device_index: int, head_width: int, dtype: torch.dtype, out_dtype: torch.dtype, shape: Shape
) -> Kernel:
    """Compiled at first use, in a second or two; call it once before a capture."""
    return compile_kernel(
        self_attention_source(head_width, dtype, out_dtype, shape),
        "ragged_attention",
        device_index=device_index,
        arch="sm_90a",
        shared_bytes=shared_bytes(head_width, shape, num_stages(head_width, shape)),
    )


def num_stages(head_width: int, shape: Shape) -> int:
    """As many blocks of K and V in flight as shared memory holds, at most 6."""
    return max(stages for stages in range(1, 7) if shared_bytes(head_width, shape, stages) <= SHARED_LIMIT)


def shared_bytes(head_width: int, shape: Shape, stages: int) -> int:
    """As laid out in the kernel: barriers, two tiles of Q, a ring of K and V."""
    row = 2 * sum(Boxes.of(head_width))
    v_row = 128 * -(-head_width // 64)
    return 1024 + 2 * shape.consumers * 64 * row + stages * shape.keys * (row + v_row)


def self_attention_source(head_width: int, dtype: torch.dtype, out_dtype: torch.dtype, shape: Shape) -> str:
    element = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    producer_registers, consumer_registers = shape.registers
    boxes = Boxes.of(head_width)
    macros = {
        "HEAD_WIDTH": head_width,
        "MAIN_WIDTH": boxes.main,
        "REST_WIDTH": boxes.rest,
        "CONSUMERS": shape.consumers,
        "KEYS": shape.keys,
        "STAGES": num_stages(head_width, shape),
        "OUT_BYTES": out_dtype.itemsize,
        "PRODUCER_REGISTERS": producer_registers,
        "CONSUMER_REGISTERS": consumer_registers,
        "ELEMENT_PTX": f'"{element}"',
        "INFINITY_F": "__int_as_float(0x7f800000)",
    }
    lines = ["typedef unsigned int u32;", "typedef unsigned long long u64;"]
    lines += [f"#define {name} {value}" for name, value in macros.items()]
    lines += [wgmma_qk(columns, element) for columns in (16, 32, 64, 128)]
    lines.append(wgmma_pv(head_width, element))
    return "\n".join(lines) + "\n" + SOURCE.read_text()


def wgmma_qk(columns: int, element: str) -> str:
    """`qk_<columns>_first` and `qk_<columns>`: both operands in shared memory, rows of 16 columns each (K-major)."""
    count = columns // 2
    first, more = (
        wgmma(
            f"qk_{columns}{suffix}(float* d, u64 a, u64 b)",
            columns,
            element,
            accumulate,
            f"%{count}, %{count + 1}, p, 1, 1, 0, 0",
            '"l"(a), "l"(b)',
        )
        for suffix, accumulate in (("_first", False), ("", True))
    )
    return f"{first}\n{more}"


def wgmma_pv(columns: int, element: str) -> str:
    """`pv`: A in registers, B's rows lie along K (MN-major, hence the last 1); always accumulates."""
    count = columns // 2
    registers = ", ".join(f"%{count + i}" for i in range(4))
    operands = f"{{{registers}}}, %{count + 4}, p, 1, 1, 1"
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) + ', "l"(b)'
    return wgmma("pv(float* d, const u32* a, u64 b)", columns, element, True, operands, inputs)


def wgmma(signature: str, columns: int, element: str, accumulate: bool, operands: str, inputs: str) -> str:
    """A wrapper of one instruction. Without `accumulate` its registers are outputs alone, none is kept."""
    accumulators = ", ".join(f"%{i}" for i in range(columns // 2))
    outputs = ", ".join(f'"{"+" if accumulate else "="}f"(d[{i}])' for i in range(columns // 2))
    shape = f"m64n{columns}k16.f32.{element}.{element}"
    return (
        f"__device__ __forceinline__ void {signature} {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {int(accumulate)}, 0;\\n"\n'
        f'        "wgmma.mma_async.sync.aligned.{shape} {{{accumulators}}}, {operands};\\n}}"\n'
        f"        : {outputs} : {inputs});\n}}"
    )
