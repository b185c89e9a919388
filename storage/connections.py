"""Opening the database file: one way to write it, one way to read it."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import quote

DATABASE = "tidemill.db"
BUSY_TIMEOUT_S = 10.0


def database(path: Path) -> Path:
    """The database file of a storage path."""
    return path / DATABASE


def open_writer(path: Path) -> sqlite3.Connection:
    """The connection that writes. Commits are durable: a COMMIT returns after its fsync."""
    conn = sqlite3.connect(
        database(path),
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )
    conn.row_factory = sqlite3.Row
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
        "cache_size = -16384",
        # Uploads write a mebibyte per commit; a checkpoint after every fourth would fsync twice as
        # often as needed.
        "wal_autocheckpoint = 4000",
        "journal_size_limit = 67108864",
    ):
        conn.execute(f"PRAGMA {pragma}")
    return conn


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write. Used by one thread at a time, not always the same."""
    conn = sqlite3.connect(
        f"file:{quote(str(database(path)))}?mode=ro",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=64,
    )
    conn.row_factory = sqlite3.Row
    return conn
