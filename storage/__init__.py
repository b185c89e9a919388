"""The store: files, batches, lines, keys, ledger and facts in SQLite."""
