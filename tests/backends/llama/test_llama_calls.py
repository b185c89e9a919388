"""Tool calls of a model in a real process, as the template in its file defines them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidemill.backends.llama.llama_replica import LlamaReplica
from tidemill.backends.llama.weights import resolve
from tidemill.types import EngineSpec, Generation, Piece

pytestmark = [pytest.mark.anyio, pytest.mark.llama]

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments.colour }}{% endfor %}\n{% endfor %}{% if tools %}"
    '{{ tools | tojson }}{"name": function name, "parameters": ...}{% endif %}'
)
PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
        },
    },
}


@pytest.fixture
def model_file(tmp_path: Path) -> str:
    """The small model with another template of the same length."""
    content = Path(resolve("smollm2")).read_bytes()
    begin = content.index(b"{% for message in messages %}")
    end = content.index(b"{% endif %}", content.index(b"add_generation_prompt", begin)) + 11
    assert len(TEMPLATE) <= end - begin
    path = tmp_path / "calling.gguf"
    path.write_bytes(content[:begin] + TEMPLATE.encode().ljust(end - begin) + content[end:])
    return str(path)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_goes_out_and_its_result_comes_back(model_file: str, *, stream: bool) -> None:
    """A forced call, which has nothing around it in this family, is a call and no text; with its
    result the conversation goes on."""
    engine = LlamaReplica(
        EngineSpec(model=model_file, slots=1, context_length=512, threads=1, weights="as-is")
    )
    await engine.start()
    try:
        assert engine.card.tools
        said = {"role": "user", "content": "Pick a colour."}
        pieces = await answer(engine, (said,), "required", stream=stream)
        assert "".join(piece.text for piece in pieces) == ""
        assert pieces[-1].finish == "tool_calls"
        (call,) = pieces[-1].tool_calls
        assert call["function"]["name"] == "pick"
        assert json.loads(call["function"]["arguments"])["colour"] in ("red", "blue")
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        pieces = await answer(engine, (said, turn, result), "none", stream=stream)
        assert pieces[-1].finish in ("stop", "length")
        assert not pieces[-1].tool_calls
    finally:
        await engine.close()


async def answer(
    engine: LlamaReplica, messages: tuple[object, ...], choice: str, *, stream: bool
) -> list[Piece]:
    """All pieces of an answer with the tool at hand."""
    asked = Generation(
        model="m", messages=messages, tools=(PICK,), tool_choice=choice, max_tokens=60,
        stream=stream,
    )  # fmt: skip
    return [piece async for piece in engine.generate(asked)]
