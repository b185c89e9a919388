"""The schema: how it comes about, what it refuses, and that its queries use it well."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlite_utils import Database

from tidemill.errors import StoreTooNew
from tidemill.storage import migrate, migrations, open_store, pending, queries
from tidemill.storage.connections import database, open_reader, open_writer

pytestmark = pytest.mark.anyio


def test_a_new_store_needs_every_migration_once(tmp_path: Path) -> None:
    """``pending`` changes nothing; ``migrate`` applies in order and then has nothing to do."""
    path = tmp_path / "new" / "store"
    names = list(migrations.known())
    assert names == sorted(names)
    assert names[0] == "0001_tables"
    assert pending(path) == names
    assert not path.exists()
    assert migrate(path) == names
    assert (pending(path), migrate(path)) == ([], [])


def test_an_older_store_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there stays; only what is new is applied."""
    migrate(tmp_path)
    known = migrations.known()
    more = {**known, "9999_more": "CREATE TABLE more (x INTEGER) STRICT;"}
    monkeypatch.setattr(migrations, "known", lambda: more)
    assert pending(tmp_path) == ["9999_more"]
    assert migrate(tmp_path) == ["9999_more"]
    assert Database(database(tmp_path))["more"].exists()


def test_a_migration_that_fails_leaves_the_store_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one transaction: nothing of it stays, and it is still pending."""
    known = migrations.known()
    broken = {**known, "9999_broken": "CREATE TABLE half (x INTEGER); CREATE TABLE broken (;"}
    monkeypatch.setattr(migrations, "known", lambda: broken)
    with pytest.raises(sqlite3.OperationalError):
        migrate(tmp_path)
    assert pending(tmp_path) == ["9999_broken"]
    assert not Database(database(tmp_path))["half"].exists()


async def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    """One sentence that says what to do; the store is not touched and not held."""
    migrate(tmp_path)
    with open_writer(tmp_path) as conn:
        conn.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at)"
            " VALUES ('tidemill', '9999_future', '2099')"
        )
    conn.close()
    for attempt in (pending, migrate):
        with pytest.raises(StoreTooNew, match="9999_future"):
            attempt(tmp_path)
    with pytest.raises(StoreTooNew, match="newer Tidemill"):
        await open_store(tmp_path).start()
    with pytest.raises(StoreTooNew):
        await open_store(tmp_path).start()


def test_every_table_is_strict(tmp_path: Path) -> None:
    """A column holds its type and nothing else."""
    migrate(tmp_path)
    db = Database(database(tmp_path))
    ours = [table for table in db.tables if not table.name.startswith(("_", "sqlite_"))]
    assert len(ours) >= 9
    assert [table.name for table in ours if not table.strict] == []


def _parameters(sql: str) -> Any:
    if "?" in sql:
        return (None,) * sql.count("?")
    return dict.fromkeys(re.findall(r":([a-z_]+)", sql))


@pytest.mark.parametrize("topic", queries.TOPICS)
def test_every_statement_fits_the_schema(topic: str, tmp_path: Path) -> None:
    """Each is named, commented where it is not plain, and can be prepared."""
    migrate(tmp_path)
    conn = open_reader(tmp_path)
    statements = queries.load(topic)
    assert statements
    for name, sql in statements.items():
        plan = conn.execute(f"EXPLAIN {sql}", _parameters(sql)).fetchall()
        assert plan, name
    conn.close()


_GROWING = {"lines", "results", "chunks", "usage"}
"""Tables that hold a row per line: no statement may walk one of them from end to end."""


@pytest.mark.parametrize("topic", ["files", "batches", "lines"])
def test_no_statement_walks_a_growing_table(topic: str, tmp_path: Path) -> None:
    """Every access is by key or by a partial index that holds only what is waiting or running."""
    migrate(tmp_path)
    conn = open_reader(tmp_path)
    for name, sql in queries.load(topic).items():
        names = dict(re.findall(r"\b(lines|results|chunks|usage) AS (\w+)", sql))
        aliases = _GROWING | set(names.values())
        for row in conn.execute(f"EXPLAIN QUERY PLAN {sql}", _parameters(sql)):
            step = re.match(r"SCAN (\w+)(.*)", row["detail"])
            if step and step[1] in aliases:
                assert "lines_running" in step[2] or "lines_waiting" in step[2], (name, step[0])
    conn.close()


def test_sql_names_are_unique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two statements of one name stop the import."""
    (tmp_path / "twice.sql").write_text("-- name: a\nSELECT 1;\n-- name: a\nSELECT 2;\n")
    monkeypatch.setattr(queries, "folder", lambda: tmp_path)
    with pytest.raises(ValueError, match="named a"):
        queries.load("twice")


_SETUP = """
INSERT INTO blobs (seq, state, created_at) VALUES (1, 'held', 1), (2, 'held', 1);
INSERT INTO files (seq, id, owner, filename, purpose, kind, bytes, created_at, facts, blob)
    VALUES (1, 'f', 'o', 'n', 'batch', 'input', 1, 1, '{}', 1);
INSERT INTO batches (seq, id, owner, input_file_id, input_file_seq, endpoint, completion_window,
    created_at, expires_at, params, placement, exclusive, status)
    VALUES (1, 'b', 'o', 'f', 1, 'e', '24h', 1, 2, '{}', '{"execution":"local"}', 1, 'in_progress');
INSERT INTO lines (batch_seq, no, offset, length, custom_id, model) VALUES (1, 1, 0, 1, 'c', 'm');
INSERT INTO results (batch_seq, no, kind, start, row) VALUES (1, 1, 'output', 0, x'7b');
"""


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """A store with a file, a batch, a line and a row; no statement of these tests changes it."""
    path = tmp_path_factory.mktemp("furnished")
    migrate(path)
    conn = open_writer(path)
    conn.executescript(_SETUP)
    yield conn
    conn.close()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE lines SET state = 'running'",
        "UPDATE lines SET holder = 'h'",
        "UPDATE lines SET state = 'done'",
        "UPDATE lines SET state = 'failed', due_at = 5",
        "UPDATE lines SET length = 0",
        "INSERT INTO lines (batch_seq, no, offset, length, custom_id, model)"
        " VALUES (1, 2, 0, 1, 'c', 'm')",
        "INSERT INTO lines (batch_seq, no, offset, length, custom_id, model)"
        " VALUES (2, 1, 0, 1, 'c', 'm')",
        "INSERT INTO results (batch_seq, no, kind, start, row) VALUES (1, 1, 'error', 0, x'7b')",
        "INSERT INTO results (batch_seq, no, kind, start, row) VALUES (1, 2, 'output', 0, x'7b')",
        "INSERT INTO results (batch_seq, no, kind, start, row) VALUES (1, 2, 'log', 0, x'7b')",
        "UPDATE batches SET status = 'done'",
        "UPDATE batches SET status = 'completed', total = 1",
        "UPDATE batches SET status = 'cancelled', queued = 1",
        "UPDATE batches SET output_file_id = 'f'",
        "UPDATE batches SET queued = -1",
        "UPDATE batches SET params = '{'",
        "UPDATE batches SET total = 'many'",
        "INSERT INTO batches (id, owner, input_file_id, input_file_seq, endpoint, created_at,"
        " completion_window, expires_at, params, placement, exclusive) SELECT 'b2', owner,"
        " input_file_id, input_file_seq, endpoint, 1, '24h', 2, params, placement, 1 FROM batches",
        "UPDATE files SET blob = NULL",
        "UPDATE files SET kind = 'output'",
        "UPDATE files SET expires_at = 0",
        "UPDATE files SET swept_at = 3, blob = NULL",
        "DELETE FROM blobs WHERE seq = 1",
        "DELETE FROM batches",
        "INSERT INTO chunks (blob, start, data) VALUES (9, 0, x'00')",
        "INSERT INTO chunks (blob, start, data) VALUES (1, 0, x'')",
        "UPDATE fence SET one = 2",
    ],
)
def test_impossible_states_are_refused(change: str, furnished: sqlite3.Connection) -> None:
    """By the database itself, whatever the code above it does."""
    with pytest.raises(sqlite3.IntegrityError):
        furnished.execute(change)
