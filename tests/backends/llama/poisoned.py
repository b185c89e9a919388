"""An engine process with two weak spots: one token aborts it, another one stops its clock.

Started in place of ``tidemill.backends.llama.child``.
"""

from __future__ import annotations

import ctypes
import os

from tidemill.backends.llama import child
from tidemill.backends.llama.native_stepper import stepper_class
from tidemill.backends.llama.sampling import Chooser
from tidemill.backends.llama.stepper import Stepper
from tidemill.scheduler.steps import Chunk, Observation

DEADLY, ENDLESS = 9_999, 9_998

Base, _ = stepper_class()


class Poisoned(Base):  # type: ignore[valid-type, misc]
    """Computes as ever, but for the two tokens."""

    def step(self, chunks: list[Chunk[Chooser]]) -> Observation:
        """Dies on one, and on the other hangs with the interpreter's lock in its hand."""
        tokens = {token for chunk in chunks for token in chunk.tokens}
        if DEADLY in tokens:
            os.abort()
        if ENDLESS in tokens:
            ctypes.PyDLL(None).sleep(1_000)
        seen: Observation = super().step(chunks)
        return seen


def poisoned() -> tuple[type[Stepper], None]:
    """The stepper of this process."""
    return Poisoned, None


if __name__ == "__main__":
    child.stepper_class = poisoned
    child.main()
