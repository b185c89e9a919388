"""Does this provider serve a Batch API? Asked at the real route, remembered, asked again in time.

A hand-set flag would go stale, and a list of deployments proves nothing. The answer is shared: a
thousand uploads wait for one probe, and none longer than a few seconds. What is not an answer
(401, 429, 5xx, a time-out) is believed for a minute, then two, up to an hour, and does not undo
the last yes.
"""

from __future__ import annotations

from collections.abc import Iterable

import anyio
import msgspec
import structlog

from tidemill import clock
from tidemill.backends import refusals
from tidemill.backends.dialects import Dialect
from tidemill.ports import Clock, Facts
from tidemill.types import Verdict

log = structlog.get_logger()

KIND = "capability"
_FIRST_DOUBT_S = 60
_LONGEST_DOUBT_S = 3_600
_EARLY = 0.9
"""Part of a verdict's life after which it is renewed in the background."""


async def probe(dialect: Dialect) -> Verdict:
    """Ask the provider once. Only ``state``, ``reason`` of the verdict are filled in."""
    try:
        raw = await dialect.client.batches.with_raw_response.list(limit=1)
        page = msgspec.json.decode(raw.http_response.content)
    except msgspec.DecodeError:
        return Verdict(state="no", reason="GET batches answered something that is not JSON")
    except Exception as exc:  # noqa: BLE001 - read() raises what is no failure of the provider
        return _verdict_of(refusals.read(exc))
    if not isinstance(page, dict) or not isinstance(page.get("data"), list):
        return Verdict(state="no", reason="GET batches answered something that is no list")
    return Verdict(state="yes", reason="GET batches answered with a list")


def _verdict_of(failure: refusals.Failure) -> Verdict:
    if failure.status in (404, 405, 501):
        return Verdict(state="no", reason=f"GET batches answered {failure.status}")
    if failure.status is None:
        return Verdict(state="unknown", reason=failure.message)
    return Verdict(
        state="unknown", reason=f"GET batches answered {failure.status}: {failure.message}"
    )


class Capability:
    """Verdicts of all providers: cached here and in the store's facts, one probe at a time each."""

    def __init__(
        self,
        dialects: Iterable[Dialect],
        facts: Facts,
        *,
        ttl_hours: float,
        patience_s: float = 5.0,
        now: Clock = clock.now_f,
    ) -> None:
        self._dialects = {dialect.provider.name: dialect for dialect in dialects}
        self._facts = facts
        self._ttl_s = max(1, int(ttl_hours * 3600))
        self.patience_s = patience_s
        """How long an upload waits for a probe, of however many providers."""
        self._now = now
        self._known: dict[str, Verdict] = {}
        self._asking: dict[str, anyio.Event] = {}
        self._wanted: set[str] = set()
        self._stir = anyio.Event()

    async def run(self) -> None:
        """Warm up, then renew each verdict before it runs out; until cancelled."""
        await self._remember()
        async with anyio.create_task_group() as tasks:
            while True:
                self._stir = anyio.Event()
                now = self._now()
                for name in self._dialects:
                    if name not in self._asking and self._renew_at(name) <= now:
                        self._asking[name] = anyio.Event()
                        self._wanted.add(name)
                for name in self._wanted:
                    tasks.start_soon(self._ask, name)
                self._wanted.clear()
                idle = [self._renew_at(name) for name in self._dialects if name not in self._asking]
                with anyio.move_on_after(max(0.0, min(idle, default=now + 3600) - now)):
                    await self._stir.wait()

    async def verdict(self, name: str) -> Verdict:
        """What is known of a provider; on a cold cache waits for the probe, a few seconds at most.

        ``run`` must be running for anything new to be learned.
        """
        known = self._known.get(name)
        if known is not None and known.until_at > self._now():
            return known
        with anyio.move_on_after(self.patience_s):
            await self.ask(name)
        late = Verdict(state="unknown", reason="the provider has not answered its probe yet")
        return self._known.get(name, late)

    async def ask(self, name: str) -> Verdict:
        """Probe now, whatever is known; callers at the same time share one probe."""
        await self.doubt(name).wait()
        return self._known[name]

    def doubt(self, name: str) -> anyio.Event:
        """Probe now, without waiting: what is known seems wrong. The event is set at the end."""
        event = self._asking.get(name)
        if event is None:
            event = self._asking[name] = anyio.Event()
            self._wanted.add(name)
            self._stir.set()
        return event

    def known(self) -> dict[str, Verdict]:
        """All verdicts, without asking anybody."""
        return dict(self._known)

    def _renew_at(self, name: str) -> float:
        verdict = self._known.get(name)
        if verdict is None:
            return 0.0
        return verdict.checked_at + (verdict.until_at - verdict.checked_at) * _EARLY

    async def _ask(self, name: str) -> None:
        try:
            with anyio.move_on_after(60):
                answer = await probe(self._dialects[name])
                await self._learn(name, answer)
                return
            await self._learn(
                name, Verdict(state="unknown", reason="GET batches did not answer in 60 s")
            )
        finally:
            self._asking.pop(name).set()
            self._stir.set()

    async def _learn(self, name: str, answer: Verdict) -> None:
        now, before = int(self._now()), self._known.get(name)
        verdict = msgspec.structs.replace(answer, checked_at=now, until_at=now + self._ttl_s)
        if answer.state == "unknown":
            failures = before.failures + 1 if before is not None else 1
            doubt_s = min(_LONGEST_DOUBT_S, _FIRST_DOUBT_S * 2 ** (failures - 1))
            verdict = msgspec.structs.replace(verdict, until_at=now + doubt_s, failures=failures)
            if before is not None and before.state == "yes":
                reason = f"served a Batch API before; the last probe: {answer.reason}"
                verdict = msgspec.structs.replace(verdict, state="yes", reason=reason)
        if before is None or before.state != verdict.state:
            log.info("provider probed", provider=name, verdict=verdict.state, reason=verdict.reason)
        self._known[name] = verdict
        await self._facts.put(KIND, self._key(name), msgspec.json.encode(verdict))

    async def _remember(self) -> None:
        """Take over what an earlier run of the server learned and is still fresh."""
        for name in self._dialects:
            found = await self._facts.get(KIND, self._key(name))
            if found is not None:
                self._known[name] = msgspec.json.decode(found[0], type=Verdict)

    def _key(self, name: str) -> str:
        # Another address is another provider, whatever its name.
        provider = self._dialects[name].provider
        return f"{name}\n{provider.base_url}\n{provider.api_version}"
