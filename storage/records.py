"""Database rows as records, and back."""

from __future__ import annotations

import sqlite3
from typing import Any, TypeVar

import msgspec

from tidemill.types import (
    BatchParams,
    BatchRecord,
    BatchStatus,
    FileFacts,
    FileRecord,
    KeyRecord,
    Limits,
    Placement,
    Problem,
    Record,
    Usage,
    UsageRow,
)

R = TypeVar("R", bound=Record)

_facts = msgspec.json.Decoder(FileFacts)
_params = msgspec.json.Decoder(BatchParams)
_placement = msgspec.json.Decoder(Placement)
_problems = msgspec.json.Decoder(tuple[Problem, ...])
_metadata = msgspec.json.Decoder(dict[str, str])
_scopes = msgspec.json.Decoder(frozenset[str])
_limits = msgspec.json.Decoder(Limits)


def text(value: object) -> str:
    """JSON for a TEXT column."""
    return msgspec.json.encode(value).decode()


def record(kind: type[R], row: sqlite3.Row, **decoded: Any) -> R:
    """A record of a row: each field is the column of its name, but for those that are given
    ``decoded``. A field without a column is an error, also where it has a default."""
    columns = (name for name in kind.__struct_fields__ if name not in decoded)
    return kind(**{name: row[name] for name in columns}, **decoded)


def file_record(row: sqlite3.Row) -> FileRecord:
    """A row of ``files`` with its ``batch_id``."""
    return record(FileRecord, row, facts=_facts.decode(row["facts"]))


def batch_record(row: sqlite3.Row) -> BatchRecord:
    """A row of ``batches``."""
    return record(
        BatchRecord,
        row,
        status=BatchStatus(row["status"]),
        metadata=None if row["metadata"] is None else _metadata.decode(row["metadata"]),
        params=params_of(row),
        usage=Usage(
            input=row["input_tokens"],
            cached=row["cached_tokens"],
            output=row["output_tokens"],
            reasoning=row["reasoning_tokens"],
        ),
        problems=problems_of(row),
        placement=placement_of(row),
        waits=None,
    )


def limits_of(row: sqlite3.Row) -> Limits:
    """The limits of a row of ``keys`` or ``accounts``."""
    return _limits.decode(row["limits"])


def params_of(row: sqlite3.Row) -> BatchParams:
    """The parameters of a row of ``batches``."""
    return _params.decode(row["params"])


def placement_of(row: sqlite3.Row) -> Placement:
    """The placement of a row of ``batches``."""
    return _placement.decode(row["placement"])


def problems_of(row: sqlite3.Row) -> tuple[Problem, ...]:
    """The problems of a row of ``batches`` or ``upstream_batches``."""
    return _problems.decode(row["problems"])


def key_record(row: sqlite3.Row) -> KeyRecord:
    """A row of ``keys``."""
    return record(KeyRecord, row, scopes=_scopes.decode(row["scopes"]), limits=limits_of(row))


def usage_row(row: sqlite3.Row) -> UsageRow:
    """A row of ``usage`` with its ``batch_id``."""
    return record(UsageRow, row, usage=record(Usage, row))
