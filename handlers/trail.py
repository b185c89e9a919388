"""Writes who did what into the audit trail."""

from __future__ import annotations

import structlog

from tidemill import clock
from tidemill.errors import StoreUnavailable
from tidemill.handlers.deps import Connection, principal, services
from tidemill.types import AuditEntry

log = structlog.get_logger()


async def note(
    connection: Connection,
    action: str,
    object: str,
    owner: str | None = None,
    *,
    once: bool = False,
) -> None:
    """Note that the asker did ``action`` to ``object``; ``owner`` is the object's, by default the
    asker's. With ``once`` an entry that is there already is not repeated.

    What was done stays done: when the trail cannot be written, the log has the entry.
    """
    audit = services(connection).store.audit
    if once and any(entry.action == action for entry in await audit.page(object=object)):
        return
    who = await principal(connection)
    entry = AuditEntry(
        at=clock.now(),
        actor=who.key_id or who.owner,
        action=action,
        object=object,
        owner=owner or who.owner,
        request_id=connection.scope["state"].get("request_id"),
    )
    try:
        await audit.note(entry)
    except StoreUnavailable as exc:
        log.error(
            "audit entry not stored",
            action=action,
            object=object,
            actor=entry.actor,
            error=exc.message,
        )
