"""All local models of one server, and the memory that they share.

``scheduler.residency`` decides, a pure function; this carries out, one decision at a time, whenever
a member stirs, the runner says where lines wait, or a turn ends.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import entry_points

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus

from tidemill import clock, models, telemetry
from tidemill.backends.member import Member
from tidemill.errors import SettingsError
from tidemill.models import Wanted
from tidemill.ports import Clock, Replica
from tidemill.scheduler.bell import Bell
from tidemill.scheduler.residency import Moves, decide
from tidemill.settings import Settings
from tidemill.types import EngineSpec, Waiting

log = structlog.get_logger()

MIB = 1 << 20


class Fleet:
    """The members by the names that they are known under here: what each is served under, with
    ``(embeddings)`` behind it where a chat model has the name already."""

    def __init__(
        self,
        wanted: Sequence[Wanted],
        make: Callable[[EngineSpec], Replica],
        *,
        budget: int,
        turn_s: float = 60.0,
        patience_s: float = 120.0,
        now: Clock = clock.now_f,
    ) -> None:
        """``budget``: bytes that loaded models may take together. Raises ``SettingsError`` for two
        models of a kind under one name."""
        self.budget = budget
        self.on_room: Callable[[], None] = lambda: None
        """Called when a model may take lines that took none before."""
        self.members: dict[str, Member] = {}
        self._turn_s, self._now = turn_s, now
        self._bell = Bell()
        self._tasks: TaskGroup | None = None
        members = [
            Member(one, make, stir=self._bell.ring, patience_s=patience_s, now=now)
            for one in wanted
        ]
        chats = {member.name for member in members if not member.embedding}
        for member in members:
            shared = member.embedding and member.name in chats
            key = f"{member.name} (embeddings)" if shared else member.name
            if key in self.members:
                raise models.twice(member.name)
            self.members[key] = member

    async def load_first(self, *, strict: bool) -> None:
        """Find the files of all models, and load those that are to be there from the start, as far
        as they fit.

        Raises ``SettingsError`` for a model that is not there or, where ``strict``, would not even
        fit alone; ``EngineUnavailable`` for one that cannot be loaded.
        """
        for key, member in self.members.items():
            size = await member.examine()
            if size > self.budget and strict:
                raise SettingsError(
                    f"The model '{key}' needs about {_mib(size)} MiB, more than the memory budget "
                    f"of {self.budget // MIB} MiB; raise 'memory_budget', or give the model fewer "
                    "'slots' or a shorter 'max_context_length'."
                )
        taken = 0
        for key, member in self.members.items():
            if not member.preload:
                continue
            if taken and taken + member.size > self.budget:
                log.info("model not loaded at start: no room", model=key, mib=_mib(member.size))
                continue
            await member.start()
            taken += member.size

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Load and unload as is asked for, until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            task_status.started()
            while True:
                look_at = self.look()
                with anyio.move_on_after(max(0.0, look_at - self._now())):
                    await self._bell.wait()

    def look(self) -> float:
        """Decide and begin what was decided; returns when to look again at the latest."""
        moves = self._decided()
        lifted = any(member.held and key not in moves.hold for key, member in self.members.items())
        for key, member in self.members.items():
            member.held = key in moves.hold
        assert self._tasks is not None, "nothing is decided before it runs"
        for key in moves.unload:
            self.members[key].state = "unloading"
            self._tasks.start_soon(self._unload, key)
        for key in moves.load:
            self.members[key].state = "loading"
            self._tasks.start_soon(self._load, key)
        if lifted:
            self.on_room()
        return moves.look_at

    def waits(self, lines: Mapping[str, Waiting]) -> None:
        """Batch lines wait for these members now, and for no others."""
        news = [m.lines_wait(lines.get(key)) for key, m in self.members.items()]
        if any(news):
            self._bell.ring()

    async def close(self) -> None:
        """Stop all engines at once."""
        for member in self.members.values():
            await member.close()

    def _decided(self) -> Moves:
        residents = [member.resident(key) for key, member in self.members.items()]
        return decide(residents, self.budget, self._turn_s, self._now())

    async def _load(self, key: str) -> None:
        member = self.members[key]
        began = clock.monotonic()
        try:
            await member.start()
        except Exception as exc:  # noqa: BLE001 - whoever waits has it; the others go on
            telemetry.MODEL_LOADS.labels(key, "failed").inc()
            log.error("model not loaded", model=key, reason=str(exc))
        else:
            telemetry.MODEL_LOADS.labels(key, "loaded").inc()
            took_s = round(clock.monotonic() - began, 1)
            log.info("model loaded", model=key, mib=_mib(member.size), took_s=took_s)
            self.on_room()
        self._bell.ring()

    async def _unload(self, key: str) -> None:
        await self.members[key].unload()
        telemetry.MODEL_UNLOADS.labels(key).inc()
        log.info("model unloaded", model=key)
        self._bell.ring()


@asynccontextmanager
async def open_fleet(settings: Settings) -> AsyncGenerator[Fleet]:
    """The models of a server, loaded as far as they are to be at start, and then on demand."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fleet = Fleet(
        models.wanted(settings),
        engine_factory(settings.engine),
        budget=settings.memory_budget * MIB or memory * 3 // 4,
        turn_s=settings.model_turn_seconds,
        patience_s=settings.model_wait_seconds,
    )
    try:
        await fleet.load_first(strict=settings.memory_budget > 0)
        async with anyio.create_task_group() as tasks:
            await tasks.start(fleet.run)
            yield fleet
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await fleet.close()


def engine_factory(name: str) -> Callable[[EngineSpec], Replica]:
    """The engine registered under ``name`` at entry point ``tidemill.engines``."""
    found = list(entry_points(group="tidemill.engines", name=name))
    if not found:
        raise SettingsError(f"Unknown engine '{name}': no package registers it.")
    try:
        factory: Callable[[EngineSpec], Replica] = found[0].load()
    except ImportError as exc:
        raise SettingsError(
            f"The engine '{name}' needs a package that is not installed ({exc.name}); "
            f"install tidemill[{name}]."
        ) from exc
    return factory


def _mib(size: int) -> int:
    return math.ceil(size / MIB)
