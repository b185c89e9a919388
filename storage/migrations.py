"""The schema's history: numbered SQL files, each applied once, in a transaction of its own.

sqlite-utils keeps the list of what was applied in the table ``_sqlite_migrations``.
"""

from __future__ import annotations

from pathlib import Path

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from tidemill.errors import StoreTooNew
from tidemill.storage import queries
from tidemill.storage.connections import database, open_writer
from tidemill.storage.lock import StoreLock

_SET = "tidemill"


def known() -> dict[str, str]:
    """All migrations of this version by name, oldest first: ``{"0001_tables": sql}``."""
    files = (queries.folder() / "migrations").iterdir()
    named = {f.name.removesuffix(".sql"): f for f in files if f.name.endswith(".sql")}
    return {name: named[name].read_text(encoding="utf-8") for name in sorted(named)}


def pending(path: Path) -> list[str]:
    """Names of the migrations that the store at ``path`` still needs; changes nothing.

    Raises ``StoreTooNew`` when a newer version has written it.
    """
    file = database(path)
    if not file.exists():
        return list(known())
    db = Database(file)
    try:
        return _pending(db, path)
    finally:
        db.close()


def migrate(path: Path) -> list[str]:
    """Bring the store at ``path`` up to date; returns the names of what was applied.

    Raises ``StoreBusy`` while a server has the store and ``StoreTooNew`` as ``pending``.
    """
    lock = StoreLock(path)
    lock.take()
    try:
        return migrate_locked(path)
    finally:
        lock.release()


def migrate_locked(path: Path) -> list[str]:
    """``migrate`` for a caller that holds the store's lock."""
    conn = open_writer(path)
    # sqlite-utils begins and ends its transactions by itself.
    db = Database(conn)
    try:
        names = _pending(db, path)
        if names:
            _history().apply(db)
        return names
    finally:
        conn.close()


def _pending(db: Database, path: Path) -> list[str]:
    history = _history()
    ours = known()
    newer = [m.name for m in history.applied(db) if m.name not in ours]
    if newer:
        raise StoreTooNew(
            f"The store at {path} was written by a newer Tidemill (it has migration {newer[-1]}); "
            "upgrade this one or choose another storage path."
        )
    return [m.name for m in history.pending(db)]


def _history() -> Migrations:
    history = Migrations(_SET)
    for name, sql in known().items():
        history(name=name)(_step(sql))
    return history


def _step(sql: str):  # type: ignore[no-untyped-def]
    def apply(db: Database) -> None:
        db.executescript(sql)

    return apply
