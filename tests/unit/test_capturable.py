"""What a graph is to hold reads no value on the host, has no shape that depends on one, and stays on its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from encoder.adapters.base import EncoderAdapter, EncoderModel
from encoder.adapters.registry import families, load_adapter
from encoder.config import EncoderConfig
from encoder.towers import minicpmv, qwen_vl, stock_attention
from encoder.types import AxisKeys, Capacity

META = torch.device("meta")

PRESETS = [
    (preset, output)
    for family in families().values()
    for preset in family.presets
    if preset.startswith("tiny-")
    for output in family.outputs
]


class OneDevice(TorchDispatchMode):
    """Refuses operations between host and device, such as copies; single numbers of the host are arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.dim()}
        assert len(devices) < 2, f"{func} between {devices}"
        return out


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attend_all(num_heads: int, head_width: int, longest: int, qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv.view(1, -1, 3, num_heads, head_width).permute(2, 0, 3, 1, 4)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


@contextmanager
def attention_on_the_device() -> Iterator[None]:
    """Our kernels, which have tests of their own, exchanged for attention of all rows to all: their twins read
    boundaries on the host."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (stock_attention, minicpmv, qwen_vl):
            patch.setattr(module, "self_attention", lambda backend, offsets, *sizes: partial(attend_all, *sizes))
        for module in (stock_attention, minicpmv):
            patch.setattr(
                module,
                "cross_attention",
                lambda backend, q, k, v, cu_seqlens, num_heads, longest: q.repeat(len(cu_seqlens) - 1, 1),
            )
        patch.setattr(
            qwen_vl,
            "window_attention",
            lambda qkv, windows, cos, sin, heads: attend_all(heads, qkv.shape[1] // (3 * heads), 64, qkv),
        )
        yield


def build(adapter: EncoderAdapter) -> EncoderModel:
    """On the meta device, where tensors have shapes alone."""
    weights = {name: torch.zeros(shape) for name, shape in adapter.weight_shapes().items()}
    return adapter.build(weights, META, torch.bfloat16, "triton", "native")


def inputs_of(adapter: EncoderAdapter, axis_keys: AxisKeys, capacity: Capacity) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=META)
        for name, spec in adapter.inputs(axis_keys, capacity).items()
    }


@pytest.mark.parametrize(("preset", "output"), PRESETS)
@torch.inference_mode()
def test_a_forward_reads_no_value_and_stays_on_its_device(preset: str, output: str) -> None:
    """In bfloat16 on the meta device, where a host read of a value is an error; for graphs of every kind it has."""
    adapter = load_adapter(EncoderConfig.model_validate({"model": preset, "output": output}))
    model = build(adapter)
    for key in adapter.axes[0].keys:
        axis_keys = (key,)
        capacity = adapter.capacity(axis_keys, 4 * adapter.sample(axis_keys).shape.num_tokens)
        model.reserve(capacity.longest)
        with attention_on_the_device(), OneDevice():
            tokens = model.forward(inputs_of(adapter, axis_keys, capacity), axis_keys, capacity)
        assert tokens.dtype == torch.bfloat16
        assert tokens.shape == (capacity.tokens, adapter.hidden_size)


def test_the_guards_notice() -> None:
    """Guards the test above: what it is to catch is an error there."""
    rows = torch.empty(3, 4, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)), OneDevice():
        rows.sum().item()
    with pytest.raises(AssertionError, match="between"), OneDevice():
        torch.arange(4).to(rows.device)
    with pytest.raises((AssertionError, RuntimeError)), OneDevice():
        rows[torch.arange(2)]


@pytest.mark.parametrize(("preset", "num_linears"), [("tiny-siglip2", 1 + 2 * 4), ("tiny-kimi-k2.5", 1 + 2 * 4 + 2)])
@torch.inference_mode()
def test_projections_are_attended_to_where_they_lie(preset: str, num_linears: int) -> None:
    """One projection a layer gives queries, keys and values, and nothing lays them together."""
    adapter = load_adapter(EncoderConfig(model=preset))
    model, axis_keys = build(adapter), adapter.axis_choices((1, 4, 4))[0]
    capacity = adapter.capacity(axis_keys, 64)
    with attention_on_the_device(), Operations() as operations:
        model.forward(inputs_of(adapter, axis_keys, capacity), axis_keys, capacity)
    assert operations.names.count("linear") == num_linears
    assert not {"stack", "clone"} & {*operations.names}
