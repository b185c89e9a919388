"""Several models in one server: who is loaded for whom, with made-up engines and time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.lowlevel import checkpoint
from msgspec.structs import fields

from tidemill.backends.echo import EchoReplica
from tidemill.backends.fleet import Fleet
from tidemill.errors import (
    EngineDown,
    EngineUnavailable,
    ModelNotLoaded,
    SettingsError,
    refusal,
)
from tidemill.models import Wanted
from tidemill.ports import Replica
from tidemill.types import EngineSpec, Generation, Lane, ReplicaStatus, Waiting

pytestmark = pytest.mark.anyio

SOMETIME = Waiting(deadline=1e9)


class Engine(EchoReplica):
    """Takes as many bytes as its model's path says, and loads once it is let."""

    def __init__(self, spec: EngineSpec, world: World) -> None:
        super().__init__(spec)
        self._world, self._size = world, int(spec.model)

    async def examine(self) -> int:
        return self._size

    async def start(self) -> None:
        self._world.said.append(f"load {self.card.id}")
        await self._world.lets.wait()
        if self.card.id in self._world.broken:
            raise EngineUnavailable("it is broken")

    async def close(self) -> None:
        self._world.said.append(f"close {self.card.id}")


class World:
    """Models of given sizes; each in the order of its name."""

    def __init__(self, *, budget: int = 10, patience_s: float = 60.0, **sizes: int) -> None:
        self.now = 1_000.0
        self.said: list[str] = []
        self.broken: set[str] = set()
        self.rooms = 0
        self.lets = anyio.Event()
        self.lets.set()
        wanted = [
            Wanted(spec=EngineSpec(model=str(size), name=name), preload=False)
            for name, size in sizes.items()
        ]
        self.fleet = Fleet(
            wanted, self._make, budget=budget, patience_s=patience_s, now=lambda: self.now
        )
        self.fleet.on_room = self._room
        self.members = self.fleet.members

    def _make(self, spec: EngineSpec) -> Replica:
        return Engine(spec, self)

    def _room(self) -> None:
        self.rooms += 1

    @asynccontextmanager
    async def up(self, *, strict: bool = True) -> AsyncGenerator[World]:
        """Its loop runs."""
        await self.fleet.load_first(strict=strict)
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.fleet.run)
            yield self
            tasks.cancel_scope.cancel()

    async def ask(self, name: str, text: str = "hi", lane: Lane = Lane.INTERACTIVE) -> str:
        """One request; its answer."""
        asked = Generation(model=name, text=text, lane=lane)
        return "".join([piece.text async for piece in self.members[name].generate(asked)])

    def states(self) -> str:
        """Of all models: L and U; small letters on the way there."""
        letters = {"loaded": "L", "loading": "l", "unloaded": "U", "unloading": "u"}
        return "".join(letters[member.status().state] for member in self.members.values())


async def until(true: Callable[[], bool]) -> None:
    """Let the other tasks go on until it is so."""
    with anyio.fail_after(20):
        while not true():
            await checkpoint()


@asynccontextmanager
async def kept_busy(world: World, name: str, lane: Lane) -> AsyncIterator[None]:
    """A request is in flight for the length of the block."""
    engine = world.members[name].engine
    assert isinstance(engine, Engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.ask, name, "!wait gate", lane)
        await until(lambda: engine.status().active > 0)
        yield
        engine.gate("gate").set()


async def test_a_model_is_loaded_once_for_all_who_ask() -> None:
    """Those who come while it is loaded wait for the same load."""
    async with World(a=6).up() as world:
        world.lets = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(world.ask, "a")
            await until(lambda: world.members["a"].status().waiting == 5)
            await until(lambda: world.members["a"].status().state == "loading")
            world.lets.set()
        assert world.said == ["load a"]
        assert world.states() == "L"


async def test_the_least_recently_used_model_makes_room() -> None:
    """Use is counted from the end of the last request."""
    async with World(a=5, b=5, c=5).up() as world:
        for name in "aba":
            world.now += 1
            assert await world.ask(name) == "hi"
        await world.ask("c")
        assert world.said == ["load a", "load b", "close b", "load c"]
        assert world.states() == "LUL"


async def test_a_model_at_work_is_waited_for_and_starts_no_line_meanwhile() -> None:
    """A person takes the next turn when what runs has ended."""
    async with World(a=6, b=6).up() as world:
        await world.ask("a")
        async with anyio.create_task_group() as tasks, kept_busy(world, "a", Lane.BATCH):
            tasks.start_soon(world.ask, "b")
            await until(lambda: world.members["a"].held)
            assert not world.members["a"].status().takes_lines
            assert world.states() == "LU"
        assert world.said == ["load a", "close a", "load b"]


async def test_who_leaves_no_longer_holds_a_model_back() -> None:
    """It takes lines again, and whoever deals them is told."""
    async with World(a=6, b=6).up() as world:
        await world.ask("a")
        async with kept_busy(world, "a", Lane.BATCH):
            rooms = world.rooms
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(world.ask, "b")
                await until(lambda: world.members["a"].held)
                tasks.cancel_scope.cancel()
            await until(lambda: not world.members["a"].held)
            assert world.rooms == rooms + 1
        assert world.states() == "LU"


async def test_a_person_waits_up_to_a_bound() -> None:
    """Then it is a 503 that says when to come again; the model that was asked for stays out."""
    world = World(a=6, b=6, patience_s=0.01)
    world.members["b"].preload = True
    async with world.up():
        async with kept_busy(world, "b", Lane.INTERACTIVE):
            with pytest.raises(ModelNotLoaded, match="'a' is not in memory") as caught:
                await world.ask("a")
        assert caught.value.retry_after_s is not None
        assert world.said == ["load b"]


async def test_a_line_that_comes_too_late_goes_back_unspent() -> None:
    """Its model was unloaded between its lease and its start. It loads nothing by itself."""
    async with World(a=6).up() as world:
        with pytest.raises(ModelNotLoaded) as caught:
            await world.ask("a", lane=Lane.BATCH)
        waits = refusal(caught.value)
        assert (waits.retry, waits.spend, waits.rest) == (True, False, False)
        assert world.said == []


async def test_lines_that_wait_load_their_model() -> None:
    """After the turn of those that are worked on, which is seen on the clock only."""
    async with World(a=6, b=6).up() as world:
        world.fleet.waits({"a": SOMETIME})
        await until(lambda: world.rooms == 1)
        assert world.states() == "LU"
        world.fleet.waits({"a": SOMETIME, "b": SOMETIME})
        world.now += 59
        assert world.fleet.look() == world.now + 1
        assert world.states() == "LU"
        world.now += 1
        world.fleet.look()
        await until(lambda: world.states() == "UL")
        assert world.said == ["load a", "close a", "load b"]


async def test_lines_of_a_lifted_batch_load_their_model_first() -> None:
    """Of two models that wait for a turn, also when it was lifted while it waited."""
    async with World(a=6, b=6, c=6).up() as world:
        world.fleet.waits({"a": SOMETIME})
        await until(lambda: world.states() == "LUU")
        world.fleet.waits({"a": SOMETIME, "b": SOMETIME})
        world.now += 10
        world.fleet.waits({"a": SOMETIME, "b": SOMETIME, "c": SOMETIME})
        world.fleet.waits({"a": SOMETIME, "b": SOMETIME, "c": Waiting(deadline=1e9, lifted=True)})
        world.now += 50
        world.fleet.look()
        await until(lambda: world.states() == "UUL")


async def test_a_model_that_a_person_used_stays_a_while() -> None:
    """Five times as long as its load took, a minute at most; lines of another one wait so long."""
    async with World(a=6, b=6).up() as world:
        for load_s, kept_s in ((2, 10), (40, 60)):
            world.lets = anyio.Event()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(world.ask, "a")
                await until(lambda: world.said[-1:] == ["load a"])
                world.now += load_s
                world.lets.set()
            world.fleet.waits({"b": SOMETIME})
            assert world.fleet.look() == world.now + kept_s
            world.now += kept_s
            world.fleet.look()
            await until(lambda: world.states() == "UL")
            world.fleet.waits({})


async def test_a_model_that_cannot_be_loaded_says_why_and_is_tried_again_later() -> None:
    """Whoever asks meanwhile gets the reason at once; lines wait."""
    async with World(a=6).up() as world:
        world.broken.add("a")
        with pytest.raises(EngineDown, match="could not be loaded: it is broken"):
            await world.ask("a")
        status = world.members["a"].status()
        assert (status.healthy, status.state) == (False, "unloaded")
        assert status.reason == "The model could not be loaded: it is broken"
        world.fleet.waits({"a": SOMETIME})
        assert world.fleet.look() == world.now + 1
        world.broken.clear()
        world.now += 1
        assert await world.ask("a") == "hi"
        assert world.members["a"].status().healthy


async def test_what_a_model_counted_survives_its_unloading() -> None:
    """Totals never go back."""
    async with World(a=6, b=6).up() as world:
        await world.ask("a", "three words here")
        await world.ask("b")
        await world.ask("a", "two words")
        assert world.members["a"].status().tokens_prefilled == 5


async def test_every_total_survives_an_unloading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was thought of later: all numbers of a status are load, size or totals."""
    numbers = {field.name for field in fields(ReplicaStatus) if field.type is int}
    totals = numbers - {"active", "waiting", "slots", "parked", "held", "memory_bytes"}
    assert {"restarts", "tokens_accepted", "refused"} < totals
    counted = ReplicaStatus(healthy=True, **dict.fromkeys(totals, 3))
    monkeypatch.setattr(Engine, "status", lambda engine: counted)
    async with World(a=6, b=6).up() as world:
        for model in "aba":
            await world.ask(model)
        status = world.members["a"].status()
        assert {name: getattr(status, name) for name in totals} == dict.fromkeys(totals, 6)


async def test_what_is_wrong_is_said_at_the_start() -> None:
    """Two models under one name; one that is larger than all the memory there is for models."""
    with pytest.raises(SettingsError, match="model 'b' needs about 1 MiB, more than"):
        await World(a=6, b=11).fleet.load_first(strict=True)
    twin = Wanted(spec=EngineSpec(model="1", name="n"), preload=False)
    with pytest.raises(SettingsError, match="under the name 'n'"):
        Fleet([twin, twin], EchoReplica, budget=1)


async def test_models_of_two_kinds_may_share_a_name() -> None:
    """Whichever comes first; the one for embeddings has it behind its name."""
    both = [
        Wanted(spec=EngineSpec(model="1", name="n", embedding=embedding), preload=False)
        for embedding in (True, False)
    ]
    for wanted in (both, both[::-1]):
        members = Fleet(wanted, EchoReplica, budget=1).members
        assert {key: one.embedding for key, one in members.items()} == {
            "n": False,
            "n (embeddings)": True,
        }


async def test_a_large_model_is_loaded_alone_where_nobody_set_a_budget() -> None:
    """What was never promised to fit is not refused."""
    async with World(a=6, b=11).up(strict=False) as world:
        await world.ask("a")
        await world.ask("b")
        assert world.states() == "UL"


async def test_at_the_start_is_loaded_what_fits() -> None:
    """In order; what does not fit comes when it is asked for."""
    world = World(a=6, b=6, c=4)
    for member in world.members.values():
        member.preload = True
    await world.fleet.load_first(strict=True)
    assert world.states() == "LUL"
