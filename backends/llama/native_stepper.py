"""The stepper with its inner loop in C++: the whole step in one call without the GIL."""

from __future__ import annotations

from typing import Any

from tidemill.backends.llama.context import Context
from tidemill.backends.llama.extension import extension
from tidemill.backends.llama.model import Model
from tidemill.backends.llama.sampling import Chooser, named_logprob
from tidemill.backends.llama.stepper import Stepper
from tidemill.scheduler.steps import Chunk, Sampled


def stepper_class() -> tuple[type[Stepper], str | None]:
    """The fastest stepper that works here, and why it is not the native one if it is not."""
    try:
        native = extension()
    except ImportError as exc:
        return Stepper, str(exc)
    NativeStepper.step_type, NativeStepper.choice_type = native.Step, native.Choice
    return NativeStepper, None


class NativeStepper(Stepper):
    """Chooses the same tokens as its base at equal schedules. ``stepper_class`` loads it."""

    interruptible = True
    step_type: Any = None
    choice_type: Any = None

    def __init__(self, model: Model, **size: Any) -> None:
        super().__init__(model, **size)
        self._native: dict[Context, Any] = {}

    def interrupt(self) -> None:
        """End the step that runs now at its next operation. Works on a CPU."""
        if self.reuses:
            for native in list(self._native.values()):
                native.interrupt()

    def close(self) -> None:
        """Free the contexts."""
        self._native.clear()
        super().close()

    def _open(self, context: Context) -> None:
        super()._open(context)
        self._native[context] = self.step_type(context.handle, self._threads)

    def _run(
        self, context: Context, chunks: list[Chunk[Chooser]]
    ) -> tuple[int, dict[int, list[Sampled]]]:
        first = context.first
        rc, chosen = self._native[context].run(
            [(c.seq - first, c.start, c.tokens, c.drafts, self._choice(c.chooser)) for c in chunks]
        )
        asked = (chunk for chunk in chunks if chunk.chooser is not None)
        return rc, {
            chunk.key: [self._named(*one) for one in some]
            for chunk, some in zip(asked, chosen, strict=rc == 0)
        }

    def _named(
        self, token: int, end: bool, logprob: float | None, top: list[tuple[int, float]]
    ) -> Sampled:
        if end:
            return Sampled(token=token, end=True)
        named = None if logprob is None else named_logprob(self._model, token, logprob, top)
        return Sampled(token=token, piece=self._model.piece(token), logprob=named)

    def _choice(self, chooser: Chooser | None) -> Any:
        if chooser is None:
            return None
        if chooser.native is None:
            chain, grammar = chooser.addresses
            chooser.native = self.choice_type(chain=chain, grammar=grammar, top=chooser.logprobs)
        return chooser.native
