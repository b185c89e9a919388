"""The audit trail: rows are added and never changed, which the database sees to.

An entry is written in the commit of what it tells, so that there is neither a deed without an entry
nor an entry without its deed.
"""

from __future__ import annotations

from tidemill.storage.queries import load
from tidemill.storage.readers import Readers
from tidemill.storage.records import record
from tidemill.storage.writer import Tx
from tidemill.types import Actor, AuditEntry

_Q = load("audit")


def note(tx: Tx, by: Actor | None, action: str, object: str, owner: str | None = None) -> None:
    """Note that ``by`` did ``action`` to ``object``, which is ``owner``'s; nothing without an
    actor: what the server does of itself is no deed."""
    if by is not None:
        tx.run(
            _Q["note"],
            {
                "at": tx.now_s,
                "actor": by.id,
                "action": action,
                "object": object,
                "owner": owner,
                "request_id": by.request_id,
            },
        )


class SqliteAudit:
    """``ports.Audit``."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def page(
        self, *, after: int = 0, limit: int = 100, object: str | None = None
    ) -> list[AuditEntry]:
        """Entries with ``seq > after``, oldest first; ``object`` keeps those about one id."""
        values = {"after": after, "limit": limit, "object": object}
        rows = await self._readers.run(lambda conn: conn.execute(_Q["page"], values).fetchall())
        return [record(AuditEntry, row) for row in rows]
