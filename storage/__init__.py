"""The store: files, batches, lines, keys, ledger and facts in SQLite."""

from __future__ import annotations

from tidemill.storage.keyring import open_keys
from tidemill.storage.migrations import migrate, pending
from tidemill.storage.sqlite import SqliteStore, open_store

__all__ = ["SqliteStore", "migrate", "open_keys", "open_store", "pending"]
