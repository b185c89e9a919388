"""What runs a line from here: on this server's engines, or at a provider's ordinary route."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import structlog

from tidemill.backends.routed import RoutedInference
from tidemill.types import Lane, Lease, Outcome, Refusal, Waiting

log = structlog.get_logger()


class _Line(msgspec.Struct):
    body: msgspec.Raw


_line = msgspec.json.Decoder(_Line)


class LocalExecutor:
    """The ``Executor`` over an ``Inference``: one line is one request in the batch lane."""

    def __init__(self, inference: RoutedInference) -> None:
        self._inference = inference

    @property
    def capacities(self) -> Mapping[str, int]:
        """Lines in flight that keep each place busy."""
        return self._inference.capacities

    def place(self, model: str, endpoint: str) -> str:
        """Where a line is answered."""
        return self._inference.place(model, endpoint)

    def waits(self, lines: Mapping[str, Waiting]) -> None:
        """Pass on which places have lines that wait."""
        self._inference.waits(lines)

    async def execute(self, lease: Lease) -> Outcome:
        """The line's answer or why there is none; never raises for the line's own failure."""
        try:
            body = bytes(_line.decode(lease.line).body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            return Refusal(
                status_code=400, code="invalid_json_line", message=f"Line {lease.no}: {exc}."
            )
        try:
            return await self._inference.answer(
                lease.endpoint,
                body,
                lane=Lane.BATCH,
                owner=lease.owner,
                defaults=lease.params,
                batch=lease.batch_id,
            )
        except Exception:
            # One line that meets a bug must not stop its batch: it may run again, then it fails.
            log.exception("line crashed", batch=lease.batch_id, line=lease.no)
            return Refusal(
                status_code=500,
                code="internal_error",
                message="The server met an unexpected error with this line.",
                type="server_error",
                retry=True,
            )
