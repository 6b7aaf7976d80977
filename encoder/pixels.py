"""Pixels of a Pillow image as an array, without holding up other threads.

`numpy.asarray(image)` takes 0.7 ms for 448x448, most of it with Python's lock held, which the thread that feeds the GPU
needs a hundred times a launch. Pillow also shows its memory as an Arrow array, which costs nothing; numpy copies out of
it four times as fast and without the lock.
"""

# Shapes: H height, W width.

from __future__ import annotations

import ctypes

import numpy as np
from PIL import Image
from PIL.Image import core  # type: ignore[attr-defined]  # its memory is documented, under "block allocator"


class _ArrowArray(ctypes.Structure):
    """https://arrow.apache.org/docs/format/CDataInterface.html"""


_ArrowArray._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
    ("dictionary", ctypes.c_void_p),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]

_address_in_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_address_in_capsule.restype = ctypes.c_void_p
_address_in_capsule.argtypes = [ctypes.py_object, ctypes.c_char_p]


def pixels_of(image: Image.Image) -> np.ndarray:
    """A copy `[H, W, 3]` of an RGB image's pixels."""
    assert image.mode == "RGB"
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    # Pillow keeps larger images in several blocks (of 16 MB, or PILLOW_BLOCK_SIZE), which it can't show as one array.
    num_rows = max(1, core.get_block_size() // max(1, 4 * image.width))
    if num_rows >= image.height:
        _copy(image, pixels)
        return pixels
    for top in range(0, image.height, num_rows):
        band = pixels[top : top + num_rows]
        _copy(image.crop((0, top, image.width, top + len(band))), band)
    return pixels


def keep_memory(num_blocks: int) -> None:
    """Let Pillow keep so many blocks that it has used, of 16 MB at most.

    To map memory anew for each picture holds Python's lock, and waits for every thread that touches memory for the
    first time.
    """
    core.set_blocks_max(num_blocks)


def _copy(image: Image.Image, pixels: np.ndarray) -> None:
    if not hasattr(image, "__arrow_c_array__") or core.get_alignment() > 1:
        # Before Pillow 11.2, or with gaps between its rows, which PILLOW_ALIGNMENT asks for.
        pixels[:] = np.asarray(image)
        return
    schema, array = image.__arrow_c_array__()  # they own what is read below
    arrow = _ArrowArray.from_address(_address_in_capsule(array, b"arrow_array"))
    start = arrow.children[0].contents.buffers[1]
    memory = (ctypes.c_uint8 * (image.width * image.height * 4)).from_address(start)
    stored = np.ctypeslib.as_array(memory).reshape(image.height, image.width, 4)  # a fourth byte pads each pixel
    for channel in range(3):
        pixels[:, :, channel] = stored[:, :, channel]
    del stored, memory, schema
