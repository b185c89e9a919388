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
from tidemill.scheduler.plan import Limits
from tidemill.scheduler.steps import Chunk, Observation, Sampled

PREFILL = 512
MOVES = 2
"""Sequences that a step may move to a lower id: each takes some milliseconds and saves a pass over
the weights in every step from then on."""


class Stepper:
    """A llama.cpp context and its batch. Used by one thread.

    Each sequence id has its own part of the key-value memory, ``context`` tokens long.
    """

    def __init__(
        self, model: Model, *, slots: int, context: int, threads: int, headroom: int
    ) -> None:
        self._model, self._context, self._threads = model, context, threads
        self.reuses = restriction(model) is None
        """False for a model whose memory of a sequence cannot be cut or moved."""
        self.limits = Limits(
            slots=slots,
            rows=PREFILL + slots,
            prefill=PREFILL,
            headroom=headroom,
            moves=MOVES if self.reuses else 0,
        )
        self._batch = _Batch(self.limits.rows)
        self._copied = np.empty(0, dtype=np.uint8)
        self._sources: set[int] = set()
        self._targets: set[int] = set()
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
        self._model.adapt(self._ctx)
        self._sources.clear()
        self._targets.clear()
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
        rc, sampled = self._run(chunks)
        self._sources.clear()
        self._targets.clear()
        if rc == 1:
            return Observation(fate="no_room")
        if rc == 2:
            return Observation(fate="aborted")
        if rc < 0:
            C.llama_free(self._ctx)
            self.open()
            return Observation(fate="lost", reason=f"llama_decode returned {rc}")
        return Observation(sampled=sampled)

    def forget(self, seq: int) -> None:
        """Drop the memory of a sequence id."""
        C.llama_memory_seq_rm(self._memory, seq, -1, -1)

    def trim(self, seq: int, length: int) -> None:
        """Drop the memory of a sequence id from position ``length`` on."""
        C.llama_memory_seq_rm(self._memory, seq, length, -1)

    def copy(self, source: int, to: int) -> bool:
        """Give an id without memory what another one has."""
        if self._model.on_gpu:
            # Stays on the device, and copies the whole part of the memory whatever is in it. The
            # next decode does it: until then neither part may be read or written from here.
            if source in self._targets:
                return False
            C.llama_memory_seq_cp(self._memory, source, to, -1, -1)
            self._sources.add(source)
            self._targets.add(to)
            return True
        size = int(C.llama_state_seq_get_size(self._ctx, source))
        if size > len(self._copied):
            self._copied = np.empty(size, dtype=np.uint8)
        state = _lent(self._copied.data)
        written = C.llama_state_seq_get_data(self._ctx, state, size, source)
        return bool(written and C.llama_state_seq_set_data(self._ctx, state, size, to))

    def state_size(self, seq: int) -> int:
        """Bytes of a sequence's state; 0 where it cannot be saved, or not before the next step."""
        if not self.reuses or seq in self._targets:
            return 0
        return int(C.llama_state_seq_get_size(self._ctx, seq))

    def save(self, seq: int, to: memoryview) -> int:
        """Write a sequence's state; how many bytes it has."""
        return int(C.llama_state_seq_get_data(self._ctx, _lent(to), len(to), seq))

    def load(self, seq: int, state: memoryview) -> bool:
        """Put a saved state onto a sequence id without memory."""
        if seq in self._sources | self._targets:
            return False
        if C.llama_state_seq_set_data(self._ctx, _lent(state), len(state), seq):
            return True
        self.forget(seq)
        return False

    def close(self) -> None:
        """Free the context."""
        if self._ctx:
            C.llama_free(self._ctx)
            self._ctx = None

    def _run(self, chunks: list[Chunk[Chooser]]) -> tuple[int, dict[int, Sampled]]:
        """What ``llama_decode`` returns and, if that is 0, the chosen tokens by key."""
        rc = int(C.llama_decode(self._ctx, self._batch.fill(chunks)))
        return rc, self._sample(chunks) if rc == 0 else {}

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


def restriction(model: Model) -> str | None:
    """Why sequences of this model cannot be cut, copied or put aside; None: they can."""
    if C.llama_model_is_recurrent(model.handle):
        return "it is recurrent"
    if C.llama_model_is_hybrid(model.handle):
        return "some of its layers are recurrent"
    if C.llama_model_n_swa(model.handle) > 0:
        return "its attention has a sliding window"
    return None


def _is_greedy(chunk: Chunk[Chooser]) -> bool:
    return chunk.chooser is not None and chunk.chooser.greedy


def _lent(state: memoryview) -> Any:
    return (ctypes.c_uint8 * len(state)).from_buffer(state)


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
