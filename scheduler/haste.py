"""What the loop does so that nobody INTERACTIVE waits behind a batch, and what limits it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tidemill.scheduler.plan import StepPlan
from tidemill.scheduler.steps import Observation
from tidemill.types import Lane

HURRIED = 4
"""Steps in a row that leave others out for INTERACTIVE prompts."""


class Haste:
    """Says when a step leaves others out, and gives up a step of others for somebody who arrives:
    not two of them in a row, so that they get on. ``arrived`` belongs to any thread, the rest to
    the engine's."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        """``interrupt`` ends the step that runs, if that is possible."""
        self._interrupt = interrupt
        self._lock = threading.Lock()
        self._waited_for = self._breakable = False
        self._gave_up = False
        self._hurried = 0

    @property
    def hurry(self) -> bool:
        """True when the next step may leave others out."""
        return self._hurried < HURRIED

    def arrived(self, lane: Lane) -> None:
        """Somebody is there whom the engine's thread has not seen yet."""
        if lane is Lane.INTERACTIVE:
            with self._lock:
                self._waited_for = True
                if self._breakable:
                    self._interrupt()

    def looked(self) -> None:
        """The engine's thread is about to see everybody who is there."""
        with self._lock:
            self._waited_for = False

    def planned(self, step: StepPlan) -> None:
        """This is the next step."""
        self._hurried = self._hurried + 1 if step.hurried else 0

    def begin(self, lanes: set[Lane]) -> bool:
        """A step of these lanes is about to run; False: it had better not."""
        with self._lock:
            gives_way = Lane.INTERACTIVE not in lanes and not self._gave_up
            self._gave_up = gives_way and self._waited_for
            self._breakable = gives_way and not self._gave_up
            return not self._gave_up

    def end(self, seen: Observation) -> None:
        """The step is over."""
        with self._lock:
            self._breakable = False
            self._gave_up = seen.fate == "interrupted"
