"""Pieces of one or several generations: collected for an answer, merged for a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tidemill.errors import EngineLost
from tidemill.ports import Replica
from tidemill.types import Generation, Piece, Usage

_AHEAD = 32
"""Pieces that a choice may be ahead of a slow reader before its engine iterator waits."""


async def whole(replica: Replica, generation: Generation, parts: list[Piece]) -> Piece:
    """One generation run to its end, as a single piece with ``finish`` and ``usage``.

    Its pieces are in ``parts`` as they come. Raises what ``Replica.generate`` raises, and
    ``EngineLost`` when the pieces stop short.
    """
    async for piece in replica.generate(generation):
        parts.append(piece)
    if not parts or parts[-1].finish is None:
        raise unfinished()
    return parts[0] if len(parts) == 1 else join(parts)


def unfinished() -> EngineLost:
    """An engine's pieces stopped before the one with ``finish``."""
    return EngineLost("The engine ended without finishing the answer; try again.")


def join(parts: Sequence[Piece]) -> Piece:
    """Consecutive pieces of one generation as one."""
    last = parts[-1]
    return Piece(
        text="".join(p.text for p in parts),
        logprobs=tuple(entry for p in parts for entry in p.logprobs),
        finish=last.finish,
        usage=last.usage,
        tool_calls=tuple(call for p in parts for call in p.tool_calls),
        reasoning="".join(p.reasoning for p in parts),
    )


async def wholes(
    replica: Replica, generations: Sequence[Generation], parts: Sequence[list[Piece]]
) -> list[Piece]:
    """All generations at once, in their order; the first failure ends the others. ``parts`` has a
    list for the pieces of each."""
    if len(generations) == 1:
        return [await whole(replica, generations[0], parts[0])]
    running = [
        asyncio.ensure_future(whole(replica, generation, its))
        for generation, its in zip(generations, parts, strict=True)
    ]
    try:
        return list(await asyncio.gather(*running))
    finally:
        await _end(running)


async def merged(
    replica: Replica, generations: Sequence[Generation]
) -> AsyncIterator[tuple[int, Piece]]:
    """``(index, piece)`` as they come. Closing it closes every generation."""
    if len(generations) == 1:
        pieces = replica.generate(generations[0])
        try:
            async for piece in pieces:
                yield 0, piece
        finally:
            await close(pieces)
        return
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue(_AHEAD)

    async def pump(index: int) -> None:
        pieces = replica.generate(generations[index])
        end: BaseException | None = None
        try:
            async for piece in pieces:
                await queue.put((index, piece))
        except Exception as exc:  # noqa: BLE001 - handed to the reader, which raises it
            end = exc
        finally:
            await close(pieces)
        await queue.put((index, end))

    running = [asyncio.ensure_future(pump(i)) for i in range(len(generations))]
    try:
        left = len(running)
        while left:
            index, item = await queue.get()
            if isinstance(item, Piece):
                yield index, item
            elif item is None:
                left -= 1
            else:
                raise item
    finally:
        await _end(running)


async def close(iterator: AsyncIterator[Any]) -> None:
    """Close an async generator that may not have run out; the slot behind it is freed."""
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()


async def _end(running: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait until it has unwound."""
    for future in running:
        future.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def total(pieces: Sequence[Piece], choices: int = 1) -> Usage:
    """Usage of a request: each prompt once, every answer."""
    if len(pieces) == 1:
        return pieces[0].usage or Usage()
    prompts = [p.usage or Usage() for p in pieces[::choices]]
    answers = [p.usage or Usage() for p in pieces]
    return Usage(
        input=sum(u.input for u in prompts),
        cached=sum(u.cached for u in prompts),
        output=sum(u.output for u in answers),
        reasoning=sum(u.reasoning for u in answers),
    )
