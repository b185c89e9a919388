"""Cases that users of batch servers reported: Azure and forwarding."""

from __future__ import annotations

import sys

from tests.cases.register import Elsewhere, missing, untested

PROVIDERS = "tests/backends/providers"
ELSEWHERE: Elsewhere = {
    "C102": ("tests/handlers/test_azure.py::test_the_whole_life_of_a_batch",),
    "C104": (f"{PROVIDERS}/test_ownership.py::test_a_batch_is_looked_after_where_it_is",),
    "C106": ("tests/sdk/test_chained.py::test_a_batch_runs_through_two_servers",),
    "C108": (
        f"{PROVIDERS}/test_refused_batches.py"
        "::test_a_file_of_several_models_that_wants_one_runs_here",
        f"{PROVIDERS}/test_forwarded_batches.py::test_several_models_are_each_run_as_named",
    ),
    "C109": (f"{PROVIDERS}/test_capability.py::test_answers_and_what_is_no_answer",),
}


def test_every_case_of_this_section_is_tested() -> None:
    """Here or elsewhere, by a test that is there."""
    assert untested(sys.modules[__name__], (102, 104, 106, 108, 109), ELSEWHERE) == set()
    assert missing(ELSEWHERE) == []
