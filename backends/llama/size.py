"""How many slots and how much context a model gets on this machine."""

from __future__ import annotations

import os
from typing import Protocol

from tidemill.scheduler.plan import SlotClass
from tidemill.scheduler.slots import PARKING_BYTES
from tidemill.types import EngineSpec

KV_BYTES = 1 << 30
"""Memory that key-value caches may take where nothing else is configured, a quarter of the
machine's at most. It is written at the start, which takes a second or two for each gigabyte."""
LONGEST_DEFAULT = 8192
LONGEST_EMBEDDING = 2048
SHORT = 2048
"""Most tokens of a slot that has not the full context; most requests need less."""
LONG_SLOTS = 2
STEP = 256
"""llama.cpp hands out memory in steps of so many tokens."""


class Facts(Protocol):
    """What a size follows from: of a loaded model, or of a header."""

    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def n_ctx_train(self) -> int: ...
    @property
    def on_gpu(self) -> bool: ...


class Size:
    """Slots and context for this machine, where the spec leaves them open.

    Where the memory does not hold the full context for every slot, a few have it, and the others a
    short one. What is set is kept: both numbers, and whoever sets both gets slots of one length.
    """

    def __init__(self, spec: EngineSpec, model: Facts, *, moves: bool = True) -> None:
        """``moves``: a sequence can go on in another context. False: all slots are alike."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        budget = min(KV_BYTES, memory // 4) // max(1, model.kv_bytes_per_token)
        wanted = spec.context_length or min(model.n_ctx_train or LONGEST_DEFAULT, LONGEST_DEFAULT)
        context = min(wanted, model.n_ctx_train or wanted)
        slots = spec.slots or (64 if model.on_gpu else 16)
        both = bool(spec.slots and spec.context_length)
        long = spec.long_slots or (slots if both else LONG_SLOTS)
        split = None
        if moves and long < slots and slots * context > budget:
            split = _split(spec, slots, long, context, budget)
        self.classes = split or (_alike(spec, slots, context, budget),)
        """Shorter ones first."""
        self.slots = sum(one.slots for one in self.classes)
        self.context = self.classes[-1].context
        """Tokens that one request may use."""
        self.tokens = sum(one.slots * one.context for one in self.classes)
        """All that the key-value caches hold."""
        wants = 0 if spec.embedding or not moves else self.tokens * model.kv_bytes_per_token
        self.parking = min(PARKING_BYTES, wants)
        """Bytes for the states of those that made way, and of conversations put aside: as much as
        those at work have, at most."""
        self.embedding_context = max(1, min(wanted, model.n_ctx_train or wanted, LONGEST_EMBEDDING))


def _alike(spec: EngineSpec, slots: int, context: int, budget: int) -> SlotClass:
    if not spec.slots and spec.context_length:
        slots = max(1, min(slots, budget // context))
    elif not spec.context_length:
        context = max(STEP, min(context, _whole(budget // slots)))
    return SlotClass(slots=slots, context=context)


def _split(
    spec: EngineSpec, slots: int, long: int, context: int, budget: int
) -> tuple[SlotClass, ...] | None:
    """The long class has half of the memory at most, unless what is set needs more; None: there
    would be no shorter one."""
    if not spec.context_length:
        context = max(STEP, min(context, _whole(budget // 2 // long)))
    elif not spec.long_slots:
        long = max(1, min(long, budget // 2 // context))
    rest = budget - long * context
    many = slots - long if spec.slots else max(0, min(slots - long, rest // STEP))
    if many == 0:
        return None
    short = max(STEP, min(SHORT, _whole(rest // many)))
    if short >= context:
        return None
    return SlotClass(slots=many, context=short), SlotClass(slots=long, context=context)


def _whole(tokens: int) -> int:
    return tokens // STEP * STEP
