"""How many slots and how much context a model gets on this machine."""

from __future__ import annotations

import os
from typing import Protocol

from tidemill.types import EngineSpec

KV_BYTES = 1 << 30
"""Memory that key-value caches may take where nothing else is configured, a quarter of the
machine's at most. It is written at the start, which takes a second or two for each gigabyte."""
LONGEST_DEFAULT = 8192
LONGEST_EMBEDDING = 2048


class Facts(Protocol):
    """What a size follows from: of a loaded model, or of a header."""

    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def n_ctx_train(self) -> int: ...
    @property
    def on_gpu(self) -> bool: ...


class Size:
    """Slots and context for this machine, where the spec leaves them open."""

    def __init__(self, spec: EngineSpec, model: Facts) -> None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        budget = min(KV_BYTES, memory // 4) // max(1, model.kv_bytes_per_token)
        wanted = spec.context_length or min(model.n_ctx_train or LONGEST_DEFAULT, LONGEST_DEFAULT)
        context = min(wanted, model.n_ctx_train or wanted)
        slots = spec.slots or (64 if model.on_gpu else 16)
        if not spec.slots and spec.context_length:
            slots = max(1, min(slots, budget // context))
        elif not spec.context_length:
            # llama.cpp hands out memory in steps of 256 tokens.
            context = max(256, min(context, budget // slots // 256 * 256))
        self.slots, self.context = slots, context
        self.embedding_context = max(1, min(wanted, model.n_ctx_train or wanted, LONGEST_EMBEDDING))
