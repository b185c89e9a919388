"""One step of llama.cpp over its C interface: the engine of ``scheduler.loop`` in plain Python."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from tidemill.backends.llama.context import UBATCH, Context
from tidemill.backends.llama.model import Model
from tidemill.backends.llama.sampling import Chooser, token_logprob
from tidemill.scheduler.plan import Limits, SlotClass
from tidemill.scheduler.steps import Chunk, Observation, Sampled

PREFILL = UBATCH
LINES = 2 * UBATCH
"""Prompt rows of a step that nobody INTERACTIVE has a part in: whole passes instead of one and a
bit, for a step that is given up when somebody comes."""
MOVES = 2
"""Sequences that a step may move to a lower id: each takes some milliseconds and saves a pass over
the weights in every step from then on."""


class Stepper:
    """A llama.cpp context for each class of sequence ids, and a batch. Used by one thread."""

    interruptible = False

    def __init__(
        self,
        model: Model,
        *,
        slots: int,
        context: int,
        threads: int,
        headroom: int,
        longer: tuple[SlotClass, ...] = (),
    ) -> None:
        """``slots`` of ``context`` tokens each, and those of ``longer`` classes."""
        self._model, self._threads = model, threads
        self.reuses = restriction(model) is None
        """False for a model whose memory of a sequence cannot be cut or moved."""
        lines = LINES if self.interruptible and self.reuses and not model.on_gpu else PREFILL
        classes = (SlotClass(slots=slots, context=context), *longer)
        total = sum(one.slots for one in classes)
        self.limits = Limits(
            slots=total,
            split=classes,
            rows=lines + total,
            prefill=PREFILL,
            prefill_lines=lines,
            headroom=headroom,
            moves=MOVES if self.reuses else 0,
        )
        most = max(one.slots for one in classes)
        self._contexts = [
            Context(model, one, first=ids[0], most=most, rows=lines + one.slots, threads=threads)
            for one, ids in zip(classes, self.limits.ids, strict=True)
        ]
        self._batch = _Batch(self.limits.rows)
        self._copied = bytearray()

    def open(self) -> None:
        """Make the contexts; raises ``EngineUnavailable`` when they do not fit into memory."""
        for context in self._contexts:
            self._open(context)

    def step(self, chunks: list[Chunk[Chooser]]) -> Observation:
        """Compute chunks of one class and choose a token after each that has a chooser."""
        context = self._at(chunks[0].seq)
        rows = sum(len(chunk.tokens) + len(chunk.drafts) for chunk in chunks)
        # llama.cpp asserts this, and its assertions end the process.
        assert 0 < rows <= context.rows, f"{rows} rows in a step of {context.rows}"
        context.step()
        rc, sampled = self._run(context, chunks)
        context.stepped()
        if rc == 1:
            return Observation(fate="no_room")
        if rc == 2:
            if not self.reuses:
                return Observation(fate="aborted")
            for chunk in chunks:  # what was computed of them is as good as nothing
                context.trim(chunk.seq, chunk.start)
            return Observation(fate="interrupted")
        if rc < 0:
            context.close()
            self._open(context)
            return Observation(fate="lost", reason=f"llama_decode returned {rc}")
        return Observation(sampled=sampled)

    def interrupt(self) -> None:
        """Too late: llama.cpp would ask Python a thousand times a step whether to go on."""

    def forget(self, seq: int) -> None:
        """Drop the memory of a sequence id."""
        self._at(seq).trim(seq, -1)

    def trim(self, seq: int, length: int) -> None:
        """Drop the memory of a sequence id from position ``length`` on."""
        self._at(seq).trim(seq, length)

    def copy(self, source: int, to: int) -> bool:
        """Give an id without memory what another one has."""
        here, there = self._at(source), self._at(to)
        if self._model.on_gpu and here is there:
            return here.copy(source, to)
        size = here.state_size(source)
        if size > len(self._copied):
            self._copied = bytearray(size)
        state = memoryview(self._copied)[:size]
        came = size > 0 and here.save(source, state) > 0 and there.load(to, state)
        if came and here is there:
            here.copied(source, to)
        return came

    def state_size(self, seq: int) -> int:
        """Bytes of a sequence's state; 0 where it cannot be saved, or not before the next step."""
        return self._at(seq).state_size(seq) if self.reuses else 0

    def save(self, seq: int, to: memoryview) -> int:
        """Write a sequence's state; how many bytes it has."""
        return self._at(seq).save(seq, to)

    def load(self, seq: int, state: memoryview) -> bool:
        """Put a saved state onto a sequence id without memory."""
        return self._at(seq).load(seq, state)

    def close(self) -> None:
        """Free the contexts."""
        for context in self._contexts:
            context.close()

    def _open(self, context: Context) -> None:
        """Make a context; also after it was lost."""
        context.open()

    def _at(self, seq: int) -> Context:
        return self._contexts[self.limits.class_of(seq)]

    def _run(
        self, context: Context, chunks: list[Chunk[Chooser]]
    ) -> tuple[int, dict[int, list[Sampled]]]:
        """What ``llama_decode`` returns and, if that is 0, the chosen tokens by key."""
        rc = int(C.llama_decode(context.handle, self._batch.fill(chunks, context.first)))
        return rc, self._sample(context, chunks) if rc == 0 else {}

    def _sample(self, context: Context, chunks: list[Chunk[Chooser]]) -> dict[int, list[Sampled]]:
        asked = [chunk for chunk in chunks if chunk.chooser is not None]
        if not asked:
            return {}
        shape = (sum(1 + len(chunk.drafts) for chunk in asked), self._model.n_vocab)
        # Rows of output in batch order; valid until the next decode.
        logits = np.ctypeslib.as_array(C.llama_get_logits(context.handle), shape=shape)
        greedy = logits.argmax(axis=1) if all(_is_greedy(chunk) for chunk in asked) else None
        sampled: dict[int, list[Sampled]] = {}
        first = 0
        for chunk in asked:
            assert chunk.chooser is not None
            chosen = sampled[chunk.key] = []
            for i, draft in enumerate([*chunk.drafts, None], first):
                token = chunk.chooser.choose(logits[i]) if greedy is None else int(greedy[i])
                chosen.append(self._sampled(chunk.chooser, logits[i], token))
                if chosen[-1].end or token != draft:
                    break
            first += 1 + len(chunk.drafts)
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

    def fill(self, chunks: list[Chunk[Chooser]], first: int) -> Any:
        """The batch of these chunks, for a context whose ids begin with ``first``."""
        at = 0
        self._logits[:] = 0
        for chunk in chunks:
            n = len(chunk.tokens) + len(chunk.drafts)
            self._token[at : at + n] = chunk.tokens + chunk.drafts
            self._pos[at : at + n] = np.arange(chunk.start, chunk.start + n)
            self._seq[at : at + n] = chunk.seq - first
            at += n
            if chunk.chooser is not None:
                self._logits[at - 1 - len(chunk.drafts) : at] = 1
        self._batch.n_tokens = at
        return self._batch
