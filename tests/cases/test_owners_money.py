"""Cases that users of batch servers reported: owners and money."""

from __future__ import annotations

import sys

import pytest

from tests.cases.register import Elsewhere, missing, untested
from tests.cases.test_results import ended
from tests.handlers.world import World, line

pytestmark = pytest.mark.anyio

ELSEWHERE: Elsewhere = {
    "C80": (
        "tests/backends/providers/test_ownership.py::"
        "test_ids_of_others_and_of_providers_are_404_and_nobody_is_asked",
    ),
    "C81": (
        "tests/handlers/test_access.py::test_a_foreign_object_looks_like_none",
        "tests/handlers/test_ownership.py::test_every_route_for",
        "tests/handlers/test_same_time.py::test_a_foreign_object_is_looked_for_as_one_that_never_was",
    ),
    "C86": (
        "tests/handlers/test_limits.py::test_a_key_narrowed_after_the_upload_cannot_create",
        "tests/handlers/test_limits.py::test_a_key_revoked_in_mid_run_stops_the_rest",
        "tests/backends/test_guard.py::test_a_key_that_lost_its_right_stops_the_rest",
    ),
    "C89": (
        "tests/handlers/test_admin.py::test_a_batch_is_booked_once_however_often_it_is_polled",
        "tests/backends/providers/test_bill.py::test_a_forwarded_batch_costs_its_batch_rate_once",
    ),
    "C91": ("tests/pure/test_rewriting.py::test_usage_is_read_in_every_shape",),
    "C93": (
        "tests/handlers/test_limits.py::"
        "test_interactive_requests_are_counted_and_batch_lines_are_not",
    ),
    "C94": (
        "tests/handlers/test_limits.py::test_who_is_over_budget_gets_402",
        "tests/backends/providers/test_bill.py::test_who_is_over_budget_is_forwarded_nothing",
    ),
}


def test_every_case_of_this_section_is_tested() -> None:
    """Here or elsewhere, by a test that is there."""
    assert untested(sys.modules[__name__], (80, 81, 82, 86, 89, 91, 93, 94), ELSEWHERE) == set()
    assert missing(ELSEWHERE) == []


async def test_c82_result_files_are_their_batchs_owners(world: World) -> None:
    """Output and error file alike: read, listed and deleted by the owner, and by nobody else."""
    end = await ended(world, line("a") + line("b", "!status 400"))
    ids = [end["output_file_id"], end["error_file_id"]]
    listed = (await world.client.get("/v1/files", params={"purpose": "batch_output"})).json()
    assert {file["id"] for file in listed["data"]} == set(ids)
    for id in ids:
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            answer = await world.client.request(
                method, f"/v1/files/{id}{path}", headers=world.as_bob()
            )
            assert answer.status_code == 404
        assert (await world.client.get(f"/v1/files/{id}/content")).status_code == 200
        assert (await world.client.delete(f"/v1/files/{id}")).status_code == 200
    theirs = await world.client.get("/v1/files", headers=world.as_bob())
    assert theirs.json()["data"] == []
