"""What a model will take and be able to do, from its files' headers, before it is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from tidemill.backends.llama import gguf
from tidemill.backends.llama.prompt import Template
from tidemill.backends.llama.size import Size
from tidemill.backends.llama.weights import expanded
from tidemill.errors import SettingsError
from tidemill.types import EngineSpec

_PART = re.compile(r"-\d{5}-of-(\d{5})$")
TYPES = {"q4_0": 2, "q8_0": 7}
"""The layouts that can be asked for, by llama.cpp's number (``llama_ftype``)."""
_AUTO = {3: "split", 9: "q8_0"}
"""What ``auto`` makes of Q4_1 and Q5_1 on a CPU."""
_BITS = {"q4_0": 4.5, "q8_0": 8.5, "split": 7.0}
"""Per weight, with its share of the block's scale and of the adapter."""


_PROCESS = 64 << 20
"""Bytes of an engine process besides: Python, llama.cpp, the buffers of a computation."""


class Footprint:
    """An estimate for a CPU; on a GPU the caches have about the same size."""

    on_gpu = False

    def __init__(self, spec: EngineSpec, path: Path, header: gguf.Header) -> None:
        self.kv_bytes_per_token = header.kv_bytes_per_token
        self.n_ctx_train = header.number("context_length")
        self.template = Template(header.template) if header.template else None
        """None: the model does not chat."""
        size = Size(spec, self)
        self.context = size.embedding_context if spec.embedding else size.context
        """Tokens that one request may use."""
        tokens = size.embedding_context + (0 if spec.embedding else size.tokens)
        self.memory_bytes = (
            _weights(spec.weights, path, header)
            + sum(expanded(one.path).stat().st_size for one in spec.adapters)
            + tokens * self.kv_bytes_per_token
            + size.parking
            + _PROCESS
        )
        """The weights as they will be laid out, the adapters, both contexts' caches, what is parked
        at most, and a process for it all."""


def footprint(spec: EngineSpec, path: Path) -> Footprint:
    """Look at the files of a model. Raises ``SettingsError`` with one sentence for what cannot be
    loaded: no model, no adapter, an adapter of another architecture."""
    header = gguf.read(path)
    if header.meta.get("general.type", "model") != "model":
        raise SettingsError(
            f"The model {path} is no model but of type '{header.meta['general.type']}'."
        )
    for one in spec.adapters:
        file = expanded(one.path)
        adapter = gguf.read(file, "adapter")
        kind = adapter.meta.get("adapter.type")
        if adapter.meta.get("general.type") != "adapter" or kind != "lora":
            raise SettingsError(f"The adapter {file} is not a GGUF with a LoRA adapter.")
        if adapter.architecture != header.architecture:
            raise SettingsError(
                f"The adapter {file} was made for architecture '{adapter.architecture}', the model "
                f"{path} has '{header.architecture}'."
            )
    return Footprint(spec, path, header)


def layout(choice: str, file_type: int | None, *, on_gpu: bool) -> str | None:
    """The layout that weights are rewritten to where ``choice`` is auto, as-is, q8_0 or q4_0: one
    of the latter, or ``split``; None: they stay as they are."""
    if choice == "auto":
        return None if file_type is None or on_gpu else _AUTO.get(file_type)
    return None if TYPES.get(choice) in (None, file_type) else choice


def _weights(choice: str, path: Path, header: gguf.Header) -> int:
    to = layout(choice, header.file_type, on_gpu=False)
    if to is not None:
        return int(header.parameters * _BITS[to] / 8)
    part = _PART.search(path.stem)
    if part is None:
        return path.stat().st_size
    parts = (
        path.with_stem(f"{path.stem[: part.start()]}-{no:05d}-of-{part[1]}")
        for no in range(1, int(part[1]) + 1)
    )
    return sum(one.stat().st_size for one in parts if one.exists())
