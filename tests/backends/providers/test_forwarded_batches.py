"""A forwarded batch, from upload to bill, with the SDK in front and behind."""

from __future__ import annotations

import json

import pytest
from worlds.house import Open, line
from worlds.provider import ProviderWorld

pytestmark = pytest.mark.anyio


async def test_a_batch_goes_where_the_discount_is(server: Open, world: ProviderWorld) -> None:
    """The client's script cannot tell: same routes, our ids, our model names, our copy."""
    async with server() as house:
        content = line("a", "one") + line("b", "two") + line("c", "!refuse")
        file = await house.upload(content)
        assert file.model_extra["tidemill_execution"] == "provider"
        batch = await house.create(file.id, metadata={"mine": "yes"})
        assert batch.id.startswith("batch_")
        assert batch.model_extra["logos_execution"] == "provider"
        ended = await house.until(batch.id)
        assert ended.status == "completed"
        assert ended.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        assert ended.metadata == {"mine": "yes"}
        good = await house.rows(ended.output_file_id)
        bad = await house.rows(ended.error_file_id)
        assert good["a"]["response"]["body"]["choices"][0]["message"]["content"] == "echo: one"
        assert good["a"]["response"]["body"]["model"] == "big"
        assert bad["c"]["response"]["status_code"] == 400
        assert bad["c"]["error"] is None
        assert "gpt-4.1" not in json.dumps(bad)
        assert set(good) | set(bad) == {"a", "b", "c"}
        assert (await house.client.files.content(file.id)).content == content
        booked = await house.server.store.ledger.usage(None, 0, 2**40)
        assert [(r.custom_id, r.execution, r.tier, r.model) for r in booked] == [
            ("b", "up", "batch", "big"),
            ("a", "up", "batch", "big"),
        ]
        assert ended.usage is not None
        assert ended.usage.input_tokens == sum(row.usage.input for row in booked) > 0
    state = world.state()
    (theirs,) = (f for f in state["files"].values() if f["purpose"] == "batch")
    assert '"model":"gpt-4.1"' in theirs["text"]
    (there,) = state["batches"].values()
    assert there["metadata"] == {"mine": "yes", "tidemill_batch": batch.id}
