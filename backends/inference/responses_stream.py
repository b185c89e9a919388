"""The events of a streamed ``/v1/responses``, numbered from 0::

created, in_progress
[output_item.added (reasoning) … output_item.done]
[output_item.added, content_part.added, output_text.delta*, output_text.done,
 content_part.done, output_item.done]
[per call: output_item.added, function_call_arguments.delta, .done, output_item.done]
completed | incomplete
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from tidemill import clock, ids
from tidemill.backends.inference import responses as shape
from tidemill.backends.inference.pieces import join
from tidemill.backends.inference.plan import Ask
from tidemill.backends.inference.responses import Body
from tidemill.backends.inference.shapes import event, logprob_shapes
from tidemill.errors import TidemillError
from tidemill.types import Piece


class Writer:
    """Numbers the events and remembers the output items."""

    def __init__(self, body: Body, ask: Ask) -> None:
        self._body = body
        self._number = 0
        self._message = ""
        self._reasoning = ""
        self._thought: list[str] = []
        self._text: list[Piece] = []
        self._output: list[dict[str, Any]] = []
        self.response = shape.response_object(
            body, ask, ids.response_id(), clock.now(), "in_progress", []
        )

    def send(self, type: str, **fields: Any) -> bytes:
        """One event with its number."""
        number = self._number
        self._number += 1
        return event({"type": type, "sequence_number": number, **fields}, type)

    def opened(self) -> Iterator[bytes]:
        """The two events that every stream begins with."""
        yield self.send("response.created", response=self.response)
        yield self.send("response.in_progress", response=self.response)

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """Events of one piece, its end included."""
        if piece.reasoning:
            yield from self._think(piece.reasoning)
        if piece.text or piece.logprobs:
            yield from self._say(piece)
        if piece.finish is not None:
            yield from self._end(piece)

    def _think(self, text: str) -> Iterator[bytes]:
        if not self._reasoning:
            self._reasoning = ids.reasoning_id()
            yield self.send(
                "response.output_item.added",
                output_index=len(self._output),
                item=shape.reasoning_item(self._reasoning, ""),
            )
        self._thought.append(text)
        yield self.send(
            "response.reasoning_text.delta",
            item_id=self._reasoning,
            output_index=len(self._output),
            content_index=0,
            delta=text,
        )

    def _thought_out(self) -> Iterator[bytes]:
        if not self._thought:
            return
        text = "".join(self._thought)
        self._thought.clear()
        item = shape.reasoning_item(self._reasoning, text)
        where = len(self._output)
        yield self.send(
            "response.reasoning_text.done",
            item_id=self._reasoning,
            output_index=where,
            content_index=0,
            text=text,
        )
        yield self.send("response.output_item.done", output_index=where, item=item)
        self._output.append(item)

    def _begin_text(self) -> Iterator[bytes]:
        yield from self._thought_out()
        self._message = ids.message_id()
        where = len(self._output)
        yield self.send(
            "response.output_item.added",
            output_index=where,
            item=shape.message_item(self._message, "in_progress", []),
        )
        yield self.send(
            "response.content_part.added",
            item_id=self._message,
            output_index=where,
            content_index=0,
            part=shape.text_part(self._body, Piece()),
        )

    def _say(self, piece: Piece) -> Iterator[bytes]:
        if not self._message:
            yield from self._begin_text()
        self._text.append(Piece(text=piece.text, logprobs=piece.logprobs))
        yield self.send(
            "response.output_text.delta",
            item_id=self._message,
            output_index=len(self._output),
            content_index=0,
            delta=piece.text,
            logprobs=logprob_shapes(piece.logprobs) if shape.scored(self._body) else [],
        )

    def _end(self, last: Piece) -> Iterator[bytes]:
        yield from self._thought_out()
        if not self._message and not last.tool_calls:
            yield from self._begin_text()
        if self._message:
            yield from self._end_text(last)
        for item in shape.call_items(self._body, last):
            yield from self._call(item)
        shape.ended_object(self.response, last, self._output)
        yield self.send(f"response.{self.response['status']}", response=self.response)

    def _end_text(self, last: Piece) -> Iterator[bytes]:
        said = join(self._text) if self._text else Piece()
        part = shape.text_part(self._body, said)
        status = "incomplete" if last.finish == "length" else "completed"
        item = shape.message_item(self._message, status, [part])
        place = {"item_id": self._message, "output_index": len(self._output), "content_index": 0}
        yield self.send(
            "response.output_text.done", **place, text=said.text, logprobs=part["logprobs"]
        )
        yield self.send("response.content_part.done", **place, part=part)
        yield self.send("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def _call(self, item: dict[str, Any]) -> Iterator[bytes]:
        where = len(self._output)
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self.send("response.output_item.added", output_index=where, item=begun)
        place = {"item_id": item["id"], "output_index": where}
        yield self.send("response.function_call_arguments.delta", **place, delta=item["arguments"])
        yield self.send(
            "response.function_call_arguments.done",
            **place,
            name=item["name"],
            arguments=item["arguments"],
        )
        yield self.send("response.output_item.done", output_index=where, item=item)
        self._output.append(item)


async def stream(
    body: Body, ask: Ask, pieces: AsyncIterator[tuple[int, Piece]], ended: dict[int, Piece]
) -> AsyncIterator[bytes]:
    """Events of one response; its last piece is put into ``ended``. A failure after the first
    event is an ``error`` event, which this API's readers know."""
    writer = Writer(body, ask)
    begun = False
    try:
        async for _, piece in pieces:
            if not begun:
                begun = True
                for one in writer.opened():
                    yield one
            if piece.finish is not None:
                ended[0] = piece
            for one in writer.piece(piece):
                yield one
    except TidemillError as error:
        if not begun:
            raise
        yield writer.send("error", code=error.code, message=error.message, param=error.param)
