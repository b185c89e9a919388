"""A process that aborts at a given step, and a GGUF whose template wants out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tidemill.backends.llama import supervisor
from tidemill.backends.llama.llama_replica import LlamaReplica
from tidemill.backends.llama.prompt import Template
from tidemill.backends.llama.weights import resolve
from tidemill.errors import RequestRefused
from tidemill.types import EngineSpec, Generation, Piece

pytestmark = pytest.mark.llama

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__func__.__globals__ }}",
    "{{ strftime_now.__globals__['os'].system('true') }}",
    "{{ self._TemplateReference__context.environment.__class__ }}",
    "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
    "{{ lipsum.__globals__ }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{% set x = messages.append({'role': 'system', 'content': 'x'}) %}",
    "{{ range(1000000000)|list }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 1 // 0 }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_template_reaches_python(source: str) -> None:
    """Whatever it tries is an error, or is undefined and renders as nothing: never an object of the
    interpreter, a file, or a change to what it was given."""
    asked = Generation(model="m", messages=({"role": "user", "content": "hello"},))
    try:
        text = Template(source).render(asked)
    except RequestRefused:
        return
    assert not any(sign in text for sign in ("class", "<function", "<module", "root:", "object at"))
    assert asked.messages == ({"role": "user", "content": "hello"},)


@pytest.fixture
def hostile(tmp_path: Path) -> str:
    """The small model with another template of the same length."""
    content = Path(resolve("smollm2")).read_bytes()
    begin = content.index(b"{% for message in messages %}")
    end = content.index(b"{% endif %}", content.index(b"add_generation_prompt", begin)) + 11
    template = ESCAPES[0].encode().ljust(end - begin)
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content[:begin] + template + content[end:])
    return str(path)


@pytest.mark.anyio
async def test_a_gguf_with_a_hostile_template_serves_everything_else(hostile: str) -> None:
    """The template is read from the file: chats are refused, and prompts are answered."""
    engine = LlamaReplica(
        EngineSpec(model=hostile, slots=1, context_length=256, threads=1, weights="as-is")
    )
    await engine.start()
    try:
        chat = Generation(model="m", messages=({"role": "user", "content": "hi"},), max_tokens=2)
        with pytest.raises(RequestRefused, match="unsafe"):
            await text(engine, chat)
        assert await text(engine, Generation(model="m", text="Once upon a", max_tokens=3))
        assert engine.status().restarts == 0
    finally:
        await engine.close()


async def text(engine: LlamaReplica, generation: Generation) -> str:
    """An answer's text."""
    pieces: list[Piece] = [piece async for piece in engine.generate(generation)]
    assert pieces[-1].finish is not None
    return "".join(piece.text for piece in pieces)


@pytest.mark.anyio
@pytest.mark.parametrize("step", [0, 1, 9])
async def test_an_engine_that_aborts_at_a_step_costs_nobody_an_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int
) -> None:
    """In the first step, in the second, or amid the answers: one restart, and all six are answered;
    those that are deterministic say what they say in a process that lives."""
    monkeypatch.setattr(supervisor, "CHILD", (str(Path(__file__).with_name("dying.py")),))
    monkeypatch.setenv("DYING_MARK", str(tmp_path / "died"))
    monkeypatch.setenv("DYING_STEP", str(step))
    fixed = [
        Generation(model="m", text=f"The {n} of", max_tokens=8, deterministic=True)
        for n in ("king", "sea", "end")
    ]
    loose = [Generation(model="m", text=f"The {n} of", max_tokens=8) for n in ("day", "art", "law")]
    engine = LlamaReplica(EngineSpec(model="smollm2", slots=3, context_length=256, threads=1))
    await engine.start()
    try:
        asked = [text(engine, g) for g in fixed + loose]
        answers = await asyncio.wait_for(asyncio.gather(*asked), 120)
        assert (tmp_path / "died").exists()
        assert engine.status().restarts == 1
        assert all(answers)
        assert answers[:3] == [await text(engine, g) for g in fixed]
        status = engine.status()
        assert (status.active, status.waiting, status.parked) == (0, 0, 0)
    finally:
        await engine.close()
