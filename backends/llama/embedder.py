"""Embeddings: a context of its own on the same weights, several inputs in one decode."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from llama_cpp import llama_cpp as C

from tidemill.backends.llama.attention import flash
from tidemill.backends.llama.model import Model
from tidemill.errors import EngineUnavailable, TidemillError

TOGETHER = 32
"""Inputs of one decode."""


class Inputs(msgspec.Struct, kw_only=True, eq=False):
    """The tokenised inputs of one request. ``done`` gets the vectors, in order, or an error;
    ``so_far`` before that, after each decode, how many tokens of them are computed."""

    key: int
    lane: int
    tokens: list[list[int]]
    done: Callable[[list[bytes] | TidemillError], None]
    so_far: Callable[[int], None] = lambda tokens: None
    vectors: dict[int, bytes] = {}


class Embedder:
    """Errands of the engine's thread: each is one decode, packed from all requests that wait."""

    def __init__(
        self,
        model: Model,
        *,
        context: int,
        threads: int,
        watch: Callable[[Sequence[int]], None] = lambda keys: None,
    ) -> None:
        """``context``: most tokens of one input, and of one decode. Memory is taken at the first
        use. ``watch`` is told whom a decode is for before it begins, and that it is over by an
        empty sequence."""
        self._watch = watch
        self._model, self.context, self._threads = model, context, threads
        self._ctx: Any = None
        self._lock = threading.Lock()
        self._queue: list[tuple[int, int, int, Inputs]] = []
        self._arrived = 0

    def submit(self, inputs: Inputs) -> None:
        """Queue a request; any thread."""
        with self._lock:
            self._arrived += 1
            for i in range(len(inputs.tokens)):
                heapq.heappush(self._queue, (inputs.lane, self._arrived, i, inputs))

    def cancel(self, keys: frozenset[int]) -> None:
        """Drop what waits for these requests; any thread."""
        with self._lock:
            self._queue = [item for item in self._queue if item[3].key not in keys]
            heapq.heapify(self._queue)

    def pending(self) -> bool:
        """True while an input waits."""
        return bool(self._queue)

    def run_one(self, rows: int) -> None:
        """Embed as many inputs as fit one decode of ``rows`` tokens, or one longer one: by lane,
        then arrival."""
        taken = self._take(rows)
        if not taken:
            return
        self._watch(sorted({inputs.key for _, inputs in taken}))
        try:
            if self._ctx is None:
                self.open()
            vectors = self._decode([inputs.tokens[i] for i, inputs in taken])
        except EngineUnavailable as exc:
            for inputs in {id(inputs): inputs for _, inputs in taken}.values():
                self.cancel(frozenset({inputs.key}))
                inputs.done(exc)
            return
        finally:
            self._watch(())
        for (i, inputs), vector in zip(taken, vectors, strict=True):
            inputs.vectors[i] = vector
        for inputs in {id(inputs): inputs for _, inputs in taken}.values():
            if len(inputs.vectors) == len(inputs.tokens):
                inputs.done([inputs.vectors[n] for n in range(len(inputs.tokens))])
            else:
                inputs.so_far(sum(len(inputs.tokens[n]) for n in inputs.vectors))

    def close(self) -> None:
        """Free the context."""
        if self._ctx is not None:
            C.llama_free(self._ctx)
            self._ctx = None

    def _take(self, rows: int) -> list[tuple[int, Inputs]]:
        taken: list[tuple[int, Inputs]] = []
        room = min(rows, self.context)
        with self._lock:
            while self._queue and len(taken) < TOGETHER:
                _, _, i, inputs = self._queue[0]
                if taken and len(inputs.tokens[i]) > room:
                    break
                room -= len(inputs.tokens[i])
                heapq.heappop(self._queue)
                taken.append((i, inputs))
        return taken

    def open(self) -> None:
        """Make the context; raises ``EngineUnavailable`` for a model without embeddings."""
        ctx = self._new(C.LLAMA_POOLING_TYPE_UNSPECIFIED)
        pooling = C.llama_pooling_type(ctx)
        if pooling == C.LLAMA_POOLING_TYPE_NONE:
            C.llama_free(ctx)
            ctx = self._new(C.LLAMA_POOLING_TYPE_MEAN)
        elif pooling == C.LLAMA_POOLING_TYPE_RANK:
            C.llama_free(ctx)
            raise EngineUnavailable("This model ranks texts and makes no embeddings.")
        self._ctx = ctx

    def _new(self, pooling: int) -> Any:
        params = C.llama_context_default_params()
        # Pooling needs every token of an input in one pass, so that a pass holds a whole decode.
        params.n_ctx = params.n_batch = params.n_ubatch = self.context
        params.n_seq_max = TOGETHER
        params.n_threads = params.n_threads_batch = self._threads
        params.embeddings = True
        params.flash_attn_type = flash()
        params.pooling_type = pooling
        params.kv_unified = True
        params.no_perf = True
        ctx = C.llama_init_from_model(self._model.handle, params)
        if not ctx:
            raise EngineUnavailable("llama.cpp cannot make an embeddings context of this model.")
        self._model.adapt(ctx)
        return ctx

    def _decode(self, inputs: list[list[int]]) -> list[bytes]:
        batch = C.llama_batch_init(sum(map(len, inputs)), 0, 1)
        try:
            row = 0
            for seq, tokens in enumerate(inputs):
                for pos, token in enumerate(tokens):
                    batch.token[row], batch.pos[row] = token, pos
                    batch.n_seq_id[row], batch.seq_id[row][0] = 1, seq
                    batch.logits[row] = 1
                    row += 1
            batch.n_tokens = row
            memory = C.llama_get_memory(self._ctx)
            if memory:
                C.llama_memory_clear(memory, True)
            rc = C.llama_decode(self._ctx, batch)
            if rc:
                raise EngineUnavailable(f"The engine could not embed: llama_decode returned {rc}.")
            return [self._vector(seq) for seq in range(len(inputs))]
        finally:
            C.llama_batch_free(batch)

    def _vector(self, seq: int) -> bytes:
        pointer = C.llama_get_embeddings_seq(self._ctx, seq)
        vector = np.ctypeslib.as_array(pointer, shape=(self._model.n_embd,)).astype(np.float64)
        norm = float(np.sqrt((vector * vector).sum()))
        return (vector / (norm or 1.0)).astype("<f4").tobytes()
