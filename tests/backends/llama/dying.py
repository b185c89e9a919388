"""An engine process that aborts once, in the step whose number is in its environment.

Started in place of ``tidemill.backends.llama.child``. The process after it finds the mark that
the first one left, and lives.
"""

from __future__ import annotations

import os
from pathlib import Path

from tidemill.backends.llama import child
from tidemill.backends.llama.native_stepper import stepper_class
from tidemill.backends.llama.sampling import Chooser
from tidemill.backends.llama.stepper import Stepper
from tidemill.scheduler.steps import Chunk, Observation

Base, _ = stepper_class()


class Dying(Base):  # type: ignore[valid-type, misc]
    """Computes as ever, but for one step."""

    left = int(os.environ.get("DYING_STEP", "0"))

    def step(self, chunks: list[Chunk[Chooser]]) -> Observation:
        """Aborts instead of computing when no step is left."""
        mark = Path(os.environ["DYING_MARK"])
        if self.left == 0 and not mark.exists():
            mark.touch()
            os.abort()
        self.left -= 1
        seen: Observation = super().step(chunks)
        return seen


def dying() -> tuple[type[Stepper], None]:
    """The stepper of this process."""
    return Dying, None


if __name__ == "__main__":
    child.stepper_class = dying
    child.main()
