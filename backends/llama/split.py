"""Q4_1 as Q4_0 and a low-rank rest: the same weights, in the format with the fast kernels.

A block of Q4_1 holds ``d * q + m`` for 32 weights, one of Q4_0 ``d * (q - 8)``, with the same ``d``
and the same ``q``. So a Q4_1 matrix ``W`` (out x in) is a Q4_0 matrix plus a constant ``m + 8 d``
for each block, and::

    W x = Q4_0 x + B (A x)     A (in/32 x in): sums of 32 neighbours     B: the constants

``B A`` is what llama.cpp calls a LoRA adapter. Its rank is a thirty-second of the width, so it
costs little beside what the kernels gain. ``A`` is stored as Q4_0, which holds 0 and 1 exactly, and
``B`` as 32-bit floats: nothing is rounded. Small models of few sequences gain least, since each
matrix takes four operations instead of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
_BYTES = 20
"""Of a block of Q4_1: d and m as 16-bit floats, 32 times four bits."""
_FILE_TYPE = 2
"""``general.file_type`` of Q4_0."""

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def split(blocks: Bytes) -> tuple[Bytes, Floats]:
    """``(out, in/32 * 20)`` bytes of Q4_1 as ``(out, in/32 * 18)`` bytes of Q4_0 and the
    constants, ``(out, rank)`` with ``rank`` a multiple of 32, zeros at the end."""
    rows = len(blocks)
    each = blocks.reshape(rows, -1, _BYTES)
    scales = np.ascontiguousarray(each[..., :4]).view(np.float16).astype(np.float32)
    fast = np.concatenate([each[..., :2], each[..., 4:]], axis=-1).reshape(rows, -1)
    constants = np.zeros((rows, _rank(each.shape[1])), dtype=np.float32)
    constants[:, : each.shape[1]] = scales[..., 1] + 8 * scales[..., 0]
    return fast, constants


def sums(blocks: int) -> Bytes:
    """``A`` for a width of ``blocks`` blocks as Q4_0, ``(rank, blocks * 18)`` bytes: row ``k`` has
    ones for block ``k``."""
    # d = -1/8: q = 0 is one, q = 8 is zero.
    out = np.full((_rank(blocks), blocks, 18), 0x88, dtype=np.uint8)
    out[..., :2] = np.array([-0.125], dtype=np.float16).view(np.uint8)
    out[np.arange(blocks), np.arange(blocks), 2:] = 0
    return out.reshape(len(out), -1)


def write(source: Path, model: Path, adapter: Path) -> None:
    """Write ``source`` with its Q4_1 matrices as Q4_0, and the adapter that makes up for it.

    Raises ``ValueError`` when the file has no such matrices or is one of several parts, and
    ``OSError`` when a file cannot be written. One matrix at a time is in memory.
    """
    from gguf import GGMLQuantizationType as Type
    from gguf import GGUFReader, GGUFWriter

    reader = GGUFReader(source)
    parts = reader.get_field("split.count")
    if parts is not None and parts.contents() > 1:
        raise ValueError("it is one of several parts")
    fast, rest = list[_Tensor](), list[_Tensor]()
    for t in reader.tensors:
        if t.tensor_type != Type.Q4_1 or len(t.shape) != 2 or not t.name.startswith("blk."):
            data = t.data
            fast.append(_Tensor(t.name, t.tensor_type, _bytes(data).shape, partial(_bytes, data)))
            continue
        rows, blocks = len(t.data), int(t.shape[0]) // BLOCK
        a, b = (_rank(blocks), blocks * 18), (rows, _rank(blocks) * 4)
        fast.append(_Tensor(t.name, Type.Q4_0, (rows, blocks * 18), partial(_fast, t.data)))
        rest.append(_Tensor(f"{t.name}.lora_a", Type.Q4_0, a, partial(sums, blocks)))
        rest.append(_Tensor(f"{t.name}.lora_b", Type.F32, b, partial(_constants, t.data)))
    if not rest:
        raise ValueError("none of its layers are Q4_1")
    architecture = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(model, architecture)
    _copy_header(reader, writer)
    _write(writer, fast)
    writer = GGUFWriter(adapter, architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 0.0)  # no scale of its own
    _write(writer, rest)


class _Tensor(NamedTuple):
    name: str
    type: Any
    shape: tuple[int, ...]
    """In bytes."""
    make: Callable[[], Bytes]


def _write(writer: Any, tensors: list[_Tensor]) -> None:
    for t in tensors:
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.uint8), math.prod(t.shape), t.type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for t in tensors:
            writer.write_tensor_data(t.make())
    finally:
        writer.close()


def _copy_header(reader: Any, writer: Any) -> None:
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":  # the writer's own
            continue
        value = _FILE_TYPE if key == "general.file_type" else field.contents()
        inner = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(key, value, field.types[0], sub_type=inner)


def _fast(blocks: Bytes) -> Bytes:
    return split(blocks)[0]


def _constants(blocks: Bytes) -> Bytes:
    return _bytes(split(blocks)[1])


def _rank(blocks: int) -> int:
    return -(-blocks // BLOCK) * BLOCK


def _bytes(data: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(data).view(np.uint8)
