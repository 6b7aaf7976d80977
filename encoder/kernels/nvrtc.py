"""CUDA C++ compiled at first use with the NVRTC that PyTorch brings, launched through the driver API."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

SHARED_BYTES_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


TENSOR_MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
TENSOR_MAP_SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle, by the bytes of a box's row
TENSOR_MAP_L2_PROMOTION_256B = 3


class TensorMap(ctypes.Structure):
    """What the bulk tensor copy engine knows of one tensor (CUtensorMap)."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


Argument = torch.Tensor | TensorMap | int | float


class Kernel:
    """One function of a loaded module, bound to one device."""

    def __init__(self, function: ctypes.c_void_p, device_index: int, shared_bytes: int) -> None:
        self.function = function
        self.device_index = device_index
        self.shared_bytes = shared_bytes

    def launch(self, num_blocks: int, num_threads: int, *arguments: Argument) -> None:
        """On the current stream. Tensors pass as pointers, ints as int32, floats as float32, tensor maps by value."""
        values = [as_ctype(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device_index).cuda_stream)
        with torch.cuda.device(self.device_index):
            check_driver(
                driver().cuLaunchKernel(
                    self.function,
                    num_blocks,
                    1,
                    1,
                    num_threads,
                    1,
                    1,
                    self.shared_bytes,
                    stream,
                    pointers,
                    None,
                )
            )


def as_ctype(argument: Argument) -> ctypes._CDataType:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, TensorMap):
        return argument
    return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_float(argument)


def compile_kernel(source: str, name: str, *, device_index: int, arch: str, shared_bytes: int) -> Kernel:
    """Compile `source`, load it on the device, and allow `name` (extern "C") its dynamic shared memory."""
    cubin = compile_cubin(source, arch)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # makes the device's primary context current
        check_driver(driver().cuModuleLoadData(ctypes.byref(module), cubin))
        check_driver(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        check_driver(driver().cuFuncSetAttribute(function, SHARED_BYTES_ATTRIBUTE, shared_bytes))
    return Kernel(function, device_index, shared_bytes)


def compile_cubin(source: str, arch: str) -> bytes:
    library = nvrtc()
    program = ctypes.c_void_p()
    check_nvrtc(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        options = (ctypes.c_char_p * 2)(f"--gpu-architecture={arch}".encode(), b"--std=c++17")
        if library.nvrtcCompileProgram(program, len(options), options):
            size = ctypes.c_size_t()
            check_nvrtc(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            check_nvrtc(library.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"NVRTC refused the kernel:\n{log.value.decode()}")
        size = ctypes.c_size_t()
        check_nvrtc(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        check_nvrtc(library.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def encode_tensor_map(
    address: int, dtype: torch.dtype, sizes: Sequence[int], strides_bytes: Sequence[int], box: Sequence[int]
) -> TensorMap:
    """A map of the tensor at `address`, its dimensions from the fastest on; `strides_bytes` leaves out that one, dense.

    What a box holds beyond `sizes` is read as zeros. A row of the box is swizzled over its own length.
    """
    rank = len(sizes)
    # The driver wants the map it writes on a multiple of 64 bytes.
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)
    tensor_map = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)
    check_driver(
        driver().cuTensorMapEncodeTiled(
            ctypes.byref(tensor_map),
            TENSOR_MAP_TYPES[dtype],
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * (rank - 1))(*strides_bytes),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,  # no interleaving
            TENSOR_MAP_SWIZZLES[box[0] * dtype.itemsize],
            TENSOR_MAP_L2_PROMOTION_256B,
            0,  # zeros beyond the tensor
        )
    )
    return tensor_map


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def nvrtc() -> ctypes.CDLL:
    # torch has loaded the library of its own CUDA version: the name finds that one.
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}")


def check_driver(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver error {result}: {(text.value or b'unknown').decode()}")


def check_nvrtc(result: int) -> None:
    if result:
        nvrtc().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC error {result}: {nvrtc().nvrtcGetErrorString(result).decode()}")
