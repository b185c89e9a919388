"""Lines of one batch that ask for exactly the same, answered once.

Compared is what the engine would be asked, after line, batch and server have had their say; so two
spellings of one request are one, and a name or a label that changes nothing does not part them.
Only answers that do not depend on chance are shared: greedy ones, and those of ``deterministic``.

::

    line 1 ──► nobody has it: computes ─────┬──► answer, kept
    line 2 ──► being computed: waits ───────┤
    line 3 ──► …                            └──► failed, may be repeated: line 2 computes
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence

import anyio
import msgspec

from tidemill import ids, telemetry
from tidemill.backends.inference.pieces import wholes
from tidemill.errors import TidemillError, refusal
from tidemill.ports import Replica
from tidemill.types import Generation, Piece, Usage

MOST_BYTES = 4 * 1024 * 1024
"""Answers that are kept per batch; the longest unused go first."""
MOST_BATCHES = 16
"""Batches whose answers are kept."""
_ENTRY_BYTES = 256
"""What an entry costs besides its answer."""

_Answer = bytes | TidemillError
"""Encoded pieces, or the error that every equal request would meet."""

_question = msgspec.json.Encoder().encode  # has no bound on integers: a schema may hold any
_encode = msgspec.msgpack.Encoder().encode
_pieces = msgspec.msgpack.Decoder(list[Piece])


class Shelf:
    """Answers of one batch by what was asked, as many as ``most_bytes`` hold."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self.bytes = 0
        """What is kept, entries included."""

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes) -> _Answer | None:
        """The answer, which counts as used now."""
        if key in self._answers:
            self._answers.move_to_end(key)
        return self._answers.get(key)

    def put(self, key: bytes, answer: _Answer) -> None:
        """Keep an answer that is not here yet; what was not used for the longest time makes room.
        An answer that is larger than all room is not kept."""
        if _size(answer) > self._most:
            return
        self._answers[key] = answer
        self.bytes += _size(answer)
        while self.bytes > self._most:
            self.bytes -= _size(self._answers.popitem(last=False)[1])


class _Flight:
    """An answer that is being computed: ``landed`` is set when nobody computes it any more."""

    def __init__(self) -> None:
        self.landed = anyio.Event()
        self.answer: _Answer | None = None
        """None after a failure that another try may not meet."""


class Duplicates:
    """Runs generations for lines of batches, each different request of a batch once."""

    def __init__(self, *, most_bytes: int = MOST_BYTES, most_batches: int = MOST_BATCHES) -> None:
        self._most_bytes, self._most_batches = most_bytes, most_batches
        self._shelves: OrderedDict[str, Shelf] = OrderedDict()
        self._flights: dict[tuple[str, bytes], _Flight] = {}
        self.waiting = Counter[Replica]()
        """Lines that keep their engine not busy: they wait for another one's answer."""
        self.on_wait: Callable[[], None] = lambda: None
        """Told when one more line waits."""

    async def wholes(
        self,
        batch: str,
        replica: Replica,
        generations: Sequence[Generation],
        parts: Sequence[list[Piece]],
    ) -> list[Piece]:
        """As ``pieces.wholes``, for a line of ``batch``.

        The pieces of a copy have ids of their own, and a usage that says that its prompt did not
        have to be computed.
        """
        if not all(repeats(generation) for generation in generations):
            return await wholes(replica, generations, parts)
        asked = digest(generations)
        while (answer := self._shelf(batch).get(asked)) is None:
            flight = self._flights.get((batch, asked))
            if flight is None:
                return await self._compute(batch, asked, wholes(replica, generations, parts))
            answer = await self._landing(flight, replica)
            if answer is not None:
                break
        telemetry.LINES_SHARED.inc()
        if isinstance(answer, TidemillError):
            raise copy.copy(answer)
        return [_copied(piece) for piece in _pieces.decode(answer)]

    async def _compute(
        self, batch: str, asked: bytes, running: Coroutine[None, None, list[Piece]]
    ) -> list[Piece]:
        flight = self._flights[batch, asked] = _Flight()
        try:
            pieces = await running
            flight.answer = _encode(pieces)
            return pieces
        except TidemillError as error:
            if not refusal(error).retry:
                flight.answer = copy.copy(error)
            raise
        finally:
            # Also when this line was cancelled, or met a bug: the next one then tries.
            del self._flights[batch, asked]
            if flight.answer is not None:
                self._shelf(batch).put(asked, flight.answer)
            flight.landed.set()

    async def _landing(self, flight: _Flight, replica: Replica) -> _Answer | None:
        self.waiting[replica] += 1
        try:
            self.on_wait()
            await flight.landed.wait()
        finally:
            self.waiting[replica] -= 1
        return flight.answer

    def _shelf(self, batch: str) -> Shelf:
        shelf = self._shelves.get(batch)
        if shelf is None:
            shelf = self._shelves[batch] = Shelf(self._most_bytes)
            if len(self._shelves) > self._most_batches:
                self._shelves.popitem(last=False)
        self._shelves.move_to_end(batch)
        return shelf


def repeats(generation: Generation) -> bool:
    """True when chance has no part in the answer."""
    return generation.sampling.temperature == 0 or generation.deterministic


def digest(generations: Sequence[Generation]) -> bytes:
    """SHA-256 of what decides the answers. A greedy choice knows no seed and cuts no candidates
    off."""
    asked = [
        msgspec.structs.replace(
            one,
            sampling=msgspec.structs.replace(
                one.sampling, seed=None, top_p=1.0, top_k=0, min_p=0.0
            ),
        )
        if one.sampling.temperature == 0
        else one
        for one in generations
    ]
    return hashlib.sha256(_question(asked)).digest()


def _size(answer: _Answer) -> int:
    return _ENTRY_BYTES + (len(answer) if isinstance(answer, bytes) else len(answer.message))


def _copied(piece: Piece) -> Piece:
    usage = piece.usage or Usage()
    return msgspec.structs.replace(
        piece,
        usage=msgspec.structs.replace(usage, cached=usage.input),
        tool_calls=tuple({**call, "id": ids.call_id()} for call in piece.tool_calls),
    )
