"""One step of llama.cpp over its C interface: the engine of ``scheduler.loop`` in plain Python."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from tidemill.backends.llama.model import Model
from tidemill.backends.llama.sampling import Chooser, token_logprob
from tidemill.errors import EngineUnavailable
from tidemill.scheduler.loop import Chunk, Observation, Sampled
from tidemill.scheduler.plan import Limits

PARKING_BYTES = 1 << 30
"""Host memory for parked sequences; beyond it a sequence is computed again."""
PREFILL = 512


class Stepper:
    """A llama.cpp context and its batch. Used by one thread.

    Each sequence id has its own part of the key-value memory, ``context`` tokens long.
    """

    def __init__(
        self, model: Model, *, slots: int, context: int, threads: int, headroom: int
    ) -> None:
        self._model, self._context, self._threads = model, context, threads
        self.limits = Limits(slots=slots, rows=PREFILL + slots, prefill=PREFILL, headroom=headroom)
        self._batch = _Batch(self.limits.rows)
        self._parked: dict[int, NDArray[np.uint8]] = {}
        self._parked_bytes = 0
        self._ctx: Any = None

    def open(self) -> None:
        """Make the context; raises ``EngineUnavailable`` when it does not fit into memory."""
        params = C.llama_context_default_params()
        slots = self.limits.slots
        params.n_ctx = self._context * slots
        params.n_seq_max = slots
        params.n_batch = self.limits.rows
        params.n_ubatch = PREFILL
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_AUTO
        params.kv_unified = False
        params.no_perf = True
        self._ctx = C.llama_init_from_model(self._model.handle, params)
        if not self._ctx:
            raise EngineUnavailable(
                f"llama.cpp cannot make a context of {slots} slots with {self._context} tokens "
                "each; set fewer slots or a shorter context."
            )
        self._memory = C.llama_get_memory(self._ctx)
        if not self._memory:
            raise EngineUnavailable(
                "This model does not generate text; name it as the embedding model instead."
            )

    def step(self, chunks: list[Chunk[Chooser]]) -> Observation:
        """Compute the chunks and choose a token after each that has a chooser."""
        rows = sum(len(chunk.tokens) for chunk in chunks)
        # llama.cpp asserts this, and its assertions end the process.
        assert 0 < rows <= self.limits.rows, f"{rows} rows in a step of {self.limits.rows}"
        rc = C.llama_decode(self._ctx, self._batch.fill(chunks))
        if rc == 1:
            return Observation(fate="no_room")
        if rc == 2:
            return Observation(fate="aborted")
        if rc < 0:
            C.llama_free(self._ctx)
            self.open()
            return Observation(fate="lost", reason=f"llama_decode returned {rc}")
        return Observation(sampled=self._sample(chunks))

    def forget(self, seq: int) -> None:
        """Drop the memory of a sequence id."""
        C.llama_memory_seq_rm(self._memory, seq, -1, -1)

    def park(self, key: int, seq: int) -> bool:
        """Copy a sequence's state to host memory; False when the parking is full."""
        size = int(C.llama_state_seq_get_size(self._ctx, seq))
        if self._parked_bytes + size > PARKING_BYTES:
            return False
        state = np.empty(size, dtype=np.uint8)
        written = int(C.llama_state_seq_get_data(self._ctx, _bytes(state), size, seq))
        if not written:
            return False
        self._parked[key] = state
        self._parked_bytes += size
        return True

    def resume(self, key: int, seq: int) -> bool:
        """Copy a parked state onto a sequence id."""
        state = self._parked[key]
        self.discard(key)
        if C.llama_state_seq_set_data(self._ctx, _bytes(state), len(state), seq):
            return True
        self.forget(seq)
        return False

    def discard(self, key: int) -> None:
        """Drop a parked state."""
        self._parked_bytes -= len(self._parked.pop(key))

    def close(self) -> None:
        """Free the context."""
        if self._ctx:
            C.llama_free(self._ctx)
            self._ctx = None

    def _sample(self, chunks: list[Chunk[Chooser]]) -> dict[int, Sampled]:
        asked = [chunk for chunk in chunks if chunk.chooser is not None]
        if not asked:
            return {}
        shape = (len(asked), self._model.n_vocab)
        # Rows of output in batch order; valid until the next decode.
        logits = np.ctypeslib.as_array(C.llama_get_logits(self._ctx), shape=shape)
        greedy = logits.argmax(axis=1) if all(_is_greedy(chunk) for chunk in asked) else None
        sampled: dict[int, Sampled] = {}
        for i, chunk in enumerate(asked):
            assert chunk.chooser is not None
            token = chunk.chooser.choose(logits[i]) if greedy is None else int(greedy[i])
            sampled[chunk.key] = self._sampled(chunk.chooser, logits[i], token)
        return sampled

    def _sampled(self, chooser: Chooser, logits: NDArray[np.float32], token: int | None) -> Sampled:
        if token is None or self._model.is_end(token):
            return Sampled(token=-1 if token is None else token, end=True)
        logprob = (
            None
            if chooser.logprobs is None
            else token_logprob(self._model, logits, token, chooser.logprobs)
        )
        return Sampled(token=token, piece=self._model.piece(token), logprob=logprob)


def _is_greedy(chunk: Chunk[Chooser]) -> bool:
    return chunk.chooser is not None and chunk.chooser.greedy


def _bytes(state: NDArray[np.uint8]) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class _Batch:
    """A ``llama_batch`` over numpy arrays, filled without a Python loop over rows."""

    def __init__(self, rows: int) -> None:
        self._token = np.zeros(rows, dtype=np.int32)
        self._pos = np.zeros(rows, dtype=np.int32)
        self._seq = np.zeros(rows, dtype=np.int32)
        self._n_seq = np.ones(rows, dtype=np.int32)
        self._logits = np.zeros(rows, dtype=np.int8)
        # Each row's list of sequence ids is one element of ``_seq``.
        base = self._seq.ctypes.data
        self._seq_at = np.arange(base, base + 4 * rows, 4, dtype=np.uintp)
        fields = dict(C.llama_batch._fields_)
        self._batch = C.llama_batch(
            n_tokens=0,
            token=ctypes.cast(self._token.ctypes.data, fields["token"]),
            embd=None,
            pos=ctypes.cast(self._pos.ctypes.data, fields["pos"]),
            n_seq_id=ctypes.cast(self._n_seq.ctypes.data, fields["n_seq_id"]),
            seq_id=ctypes.cast(self._seq_at.ctypes.data, fields["seq_id"]),
            logits=ctypes.cast(self._logits.ctypes.data, fields["logits"]),
        )

    def fill(self, chunks: list[Chunk[Chooser]]) -> Any:
        """The batch of these chunks."""
        at = 0
        self._logits[:] = 0
        for chunk in chunks:
            n = len(chunk.tokens)
            self._token[at : at + n] = chunk.tokens
            self._pos[at : at + n] = np.arange(chunk.start, chunk.start + n)
            self._seq[at : at + n] = chunk.seq
            at += n
            self._logits[at - 1] = chunk.chooser is not None
        self._batch.n_tokens = at
        return self._batch
