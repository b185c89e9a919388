"""Writes the decision table of ``where-a-batch-runs.md`` from the table that the tests check.

``make docs`` runs it; a test fails when the page is not what it would write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = HERE / "where-a-batch-runs.md"
_PART = re.compile(r"(<!-- begin decisions -->\n).*?(<!-- end decisions -->)", re.DOTALL)


def decisions() -> Iterator[str]:
    """One row per row of the tests' table, in its order."""
    sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]
    from pure.test_placement import TABLE

    yield "| situation | the batch runs |"
    yield "|---|---|"
    for situation, _, outcome in TABLE:
        if outcome == "here":
            where = "here"
        elif outcome[0].isdigit():
            status, code = outcome.split()
            where = f"nowhere: {status} `{code}`"
        else:
            where = f"at `{outcome}`"
        yield f"| {situation} | {where} |"


def render(page: str) -> str:
    """The page with its table written anew."""
    return _PART.sub(lambda m: m[1] + "\n".join(decisions()) + "\n" + m[2], page)


def main() -> int:
    """Write the page."""
    PAGE.write_text(render(PAGE.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
