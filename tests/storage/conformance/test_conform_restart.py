"""What every store knows after it was closed and opened again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.conformance.conftest import Factory
from tests.storage.world import (
    OWNER,
    Hand,
    Input,
    begin,
    content,
    finish,
    fresh,
    lease,
    results,
    settlement,
)
from tidemill.types import NewFile, Page

pytestmark = pytest.mark.anyio


async def test_finished_lines_stay_and_lines_in_flight_run_again(
    factory: Factory, tmp_path: Path, clock: Hand
) -> None:
    """Answered lines are neither run nor booked again; the batch counts the others."""
    store = factory(tmp_path, clock)
    await store.start()
    batch = await begin(store, Input(10))
    leases = await lease(store, batch, 6)
    await store.lines.settle([settlement(one) for one in leases[:4]])
    await store.close()

    store = factory(tmp_path, clock)
    await store.start()
    now = await fresh(store, batch)
    assert (now.completed, now.lines_rerun) == (4, 2)
    assert (await store.lines.running(batch.seq), await store.lines.queued()) == (0, 6)
    again = await lease(store, batch, 2)
    assert [(one.no, one.attempt) for one in again] == [(x.no, 2) for x in leases[4:]]
    assert min(one.token for one in again) > max(one.token for one in leases)
    (late,) = await store.lines.settle([settlement(leases[5])])
    assert late.accepted == 0
    await store.lines.settle([settlement(one) for one in again])
    ended = await finish(store, batch)
    output, _ = await results(store, ended)
    assert sorted(str(row["custom_id"]) for row in output) == sorted(f"c{i}" for i in range(1, 11))
    assert len(await store.ledger.usage(OWNER, 0, 2**40)) == 10
    await store.close()


async def test_drafts_do_not_outlive_their_process(
    factory: Factory, tmp_path: Path, clock: Hand
) -> None:
    """Whole files are as they were; half a file is gone."""
    store = factory(tmp_path, clock)
    await store.start()
    draft = await store.files.draft(NewFile(owner=OWNER, filename="half"))
    await draft.append(b"x" * 2_000_000)
    ended = await finish(store, await begin(store, Input(3)))
    before, _ = await store.files.page(OWNER, Page())
    bytes_before = [await content(store, file) for file in before]
    await store.close()

    store = factory(tmp_path, clock)
    await store.start()
    after, _ = await store.files.page(OWNER, Page())
    assert after == before
    assert [await content(store, file) for file in after] == bytes_before
    assert await fresh(store, ended) == ended
    await store.close()
