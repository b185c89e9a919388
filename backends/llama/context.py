"""One llama.cpp context: what the sequence ids of one class remember, and their states."""

from __future__ import annotations

import ctypes
from typing import Any

from llama_cpp import llama_cpp as C

from tidemill.backends.llama.attention import Beginnings, flash, unshare
from tidemill.backends.llama.model import Model
from tidemill.backends.llama.state import WORD, fitted
from tidemill.errors import EngineUnavailable
from tidemill.scheduler.plan import SlotClass

UBATCH = 512
"""Rows that llama.cpp computes in one pass."""


class Context:
    """Sequence ids ``first ..``, each with its own part of the key-value memory.

    Methods take the engine's ids; llama.cpp counts from 0 in each context. Used by one thread.
    """

    def __init__(
        self, model: Model, size: SlotClass, *, first: int, most: int, rows: int, threads: int
    ) -> None:
        """``most``: ids of the largest context that shall read its states. ``rows``: most rows of
        one step."""
        self.first, self._model, self._size = first, model, size
        self._spare = WORD * (most - size.slots)
        self.rows, self._threads = rows, threads
        self.handle: Any = None
        self._sources: set[int] = set()
        self._targets: set[int] = set()
        self._beginnings = Beginnings(size.slots)

    def open(self) -> None:
        """Make the context; raises ``EngineUnavailable`` when it does not fit into memory."""
        params = C.llama_context_default_params()
        params.n_ctx = self._size.context * self._size.slots
        params.n_seq_max = self._size.slots
        params.n_batch = self.rows
        params.n_ubatch = UBATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = flash()
        params.kv_unified = False
        params.no_perf = True
        self.handle = C.llama_init_from_model(self._model.handle, params)
        if not self.handle:
            raise EngineUnavailable(
                f"llama.cpp cannot make a context of {self._size.slots} slots with "
                f"{self._size.context} tokens each; set fewer slots or a shorter context."
            )
        self._model.adapt(self.handle)
        self._beginnings = Beginnings(self._size.slots)
        self.stepped()
        self._memory = C.llama_get_memory(self.handle)
        if not self._memory:
            raise EngineUnavailable(
                "This model does not generate text; name it as the embedding model instead."
            )

    def close(self) -> None:
        """Free the context."""
        if self.handle:
            C.llama_free(self.handle)
            self.handle = None

    def step(self) -> None:
        """A step of this context is next."""
        self._beginnings.share()

    def stepped(self) -> None:
        """A step of this context is over: it made the copies that were noted."""
        unshare()
        self._sources.clear()
        self._targets.clear()

    def trim(self, seq: int, length: int) -> None:
        """Drop the memory of an id from position ``length`` on."""
        C.llama_memory_seq_rm(self._memory, seq - self.first, length, -1)
        self._beginnings.cut(seq - self.first, max(0, length))

    def copy(self, source: int, to: int) -> bool:
        """Note a copy that stays on the device, of the whole part of the memory whatever is in it.
        The next step makes it: until then neither part may be read or written from here."""
        if source in self._targets:
            return False
        C.llama_memory_seq_cp(self._memory, source - self.first, to - self.first, -1, -1)
        self._sources.add(source)
        self._targets.add(to)
        return True

    def copied(self, source: int, to: int) -> None:
        """``to`` has the state of ``source`` now."""
        tokens = 1 + int(C.llama_memory_seq_pos_max(self._memory, source - self.first))
        self._beginnings.copied(source - self.first, to - self.first, tokens)

    def state_size(self, seq: int) -> int:
        """Bytes of a sequence's state; 0 where it cannot be saved before the next step."""
        if seq in self._targets:
            return 0
        return int(C.llama_state_seq_get_size(self.handle, seq - self.first)) + self._spare

    def save(self, seq: int, to: memoryview) -> int:
        """Write a sequence's state; how many bytes it has, 0: it could not."""
        own = seq - self.first
        used = int(C.llama_state_seq_get_data(self.handle, _lent(to), len(to), own))
        if used:
            to[used : used + self._spare] = bytes(self._spare)
            used += self._spare
        return used

    def load(self, seq: int, state: memoryview) -> bool:
        """Put a state, saved here or in another context of the model, onto an id without memory."""
        if seq in self._sources | self._targets:
            return False
        own = seq - self.first
        with fitted(state, self._size.slots) as readable:
            address = _lent(readable)
            came = bool(C.llama_state_seq_set_data(self.handle, address, len(readable), own))
        self._beginnings.cut(own, 0)  # whatever was there is gone
        if not came:
            self.trim(seq, -1)
        return came


def _lent(state: memoryview) -> Any:
    return (ctypes.c_uint8 * len(state)).from_buffer(state)
