"""Named places where a test may kill the process, to prove that nothing is lost there.

``TIDEMILL_CRASH_AT=name`` kills this process with SIGKILL the first time it comes past ``name``,
``name:3`` the third time. Without the variable a crash point costs one comparison.
"""

from __future__ import annotations

import os
import signal

CRASH_POINTS = (
    "draft.append.before_commit",
    "draft.append.after_commit",
    "draft.commit.before_commit",
    "draft.commit.after_commit",
    "batch.open.before_commit",
    "batch.open.after_commit",
    "lines.add.before_commit",
    "lines.add.after_commit",
    "lines.lease.before_commit",
    "lines.lease.after_commit",
    "lines.settle.before_commit",
    "lines.settle.after_commit",
    "lines.close.before_commit",
    "lines.close.after_commit",
    "incremental.append.half_a_row",
    "batch.read.before_start",
    "line.run.before_execute",
    "line.run.after_execute",
    "batch.cancel.after_commit",
    "batch.end.before_commit",
    "batch.end.after_commit",
    "file.delete.after_commit",
    "sweep.step.after_commit",
    "upstream.keep_batch.before_commit",
    "upstream.keep_batch.after_commit",
    "upstream.settle.before_commit",
    "upstream.settle.after_commit",
    "provider.create.after_answer",
)
"""Every name that ``crash_point`` is called with."""


def _armed(value: str) -> tuple[str, int]:
    name, _, nth = value.partition(":")
    return name, int(nth or 1)


_name, _left = _armed(os.environ.get("TIDEMILL_CRASH_AT", ""))


def armed(name: str) -> bool:
    """True when this process is to die at ``name`` (some point may have to prepare for it)."""
    return name == _name


def crash_point(name: str) -> None:
    """Die here, as if the power went, when the environment says so."""
    global _left
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
