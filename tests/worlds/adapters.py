"""LoRA adapters for the embedded model, written byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

WIDTH = 576
"""Of SmolLM2-135M: an attention's output has this many rows and columns."""
LAYERS = 30
_STRING, _FLOAT = 8, 6
_ALIGNED = 32


def lora(path: Path, *, architecture: str = "llama", type: str = "adapter", seed: int = 1) -> Path:
    """An adapter of rank 1 on the attention's output of every layer. What it says is noise."""
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = f"blk.{layer}.attn_output.weight"
        for part, shape in (("lora_a", (1, WIDTH)), ("lora_b", (WIDTH, 1))):
            tensors[f"{name}.{part}"] = random.normal(0, 0.3, shape).astype("<f4")
    pairs = [
        (_STRING, "general.architecture", architecture),
        (_STRING, "general.type", type),
        (_STRING, "adapter.type", "lora"),
        (_FLOAT, "adapter.lora.alpha", 1.0),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for kind, key, value in pairs:
        written = _text(str(value)) if kind == _STRING else struct.pack("<f", value)
        head += _text(key) + struct.pack("<I", kind) + written
    data = b""
    for name, tensor in tensors.items():
        sizes = tensor.shape[::-1]
        head += _text(name) + struct.pack("<I2QIQ", 2, *sizes, 0, len(data))
        data += _padded(tensor.tobytes())
    path.write_bytes(_padded(head) + data)
    return path


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % _ALIGNED)
