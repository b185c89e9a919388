"""Database rows as records, and back."""

from __future__ import annotations

import sqlite3

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
    Usage,
    UsageRow,
)

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


def file_record(row: sqlite3.Row) -> FileRecord:
    """A row of ``files`` with its ``batch_id``."""
    return FileRecord(
        seq=row["seq"],
        id=row["id"],
        owner=row["owner"],
        filename=row["filename"],
        purpose=row["purpose"],
        kind=row["kind"],
        bytes=row["bytes"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        facts=_facts.decode(row["facts"]),
        batch_id=row["batch_id"],
    )


def batch_record(row: sqlite3.Row) -> BatchRecord:
    """A row of ``batches``."""
    return BatchRecord(
        seq=row["seq"],
        id=row["id"],
        owner=row["owner"],
        key_id=row["key_id"],
        input_file_id=row["input_file_id"],
        input_file_seq=row["input_file_seq"],
        endpoint=row["endpoint"],
        completion_window=row["completion_window"],
        status=BatchStatus(row["status"]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        in_progress_at=row["in_progress_at"],
        finalizing_at=row["finalizing_at"],
        completed_at=row["completed_at"],
        failed_at=row["failed_at"],
        expired_at=row["expired_at"],
        cancelling_at=row["cancelling_at"],
        cancelled_at=row["cancelled_at"],
        metadata=None if row["metadata"] is None else _metadata.decode(row["metadata"]),
        params=_params.decode(row["params"]),
        output_expires_after_s=row["output_expires_after_s"],
        total=row["total"],
        completed=row["completed"],
        failed=row["failed"],
        usage=Usage(
            input=row["input_tokens"],
            cached=row["cached_tokens"],
            output=row["output_tokens"],
            reasoning=row["reasoning_tokens"],
        ),
        model=row["model"],
        lines_rerun=row["lines_rerun"],
        problems=_problems.decode(row["problems"]),
        output_file_id=row["output_file_id"],
        error_file_id=row["error_file_id"],
        placement=_placement.decode(row["placement"]),
        max_cost=row["max_cost"],
        cost=row["cost"],
        held=row["held"],
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


def key_record(row: sqlite3.Row) -> KeyRecord:
    """A row of ``keys``."""
    return KeyRecord(
        id=row["id"],
        name=row["name"],
        owner=row["owner"],
        prefix=row["prefix"],
        digest=row["digest"],
        scopes=_scopes.decode(row["scopes"]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        team_id=row["team_id"],
        user_id=row["user_id"],
        limits=limits_of(row),
        last_used_at=row["last_used_at"],
    )


def usage_row(row: sqlite3.Row) -> UsageRow:
    """A row of ``usage`` with its ``batch_id``."""
    return UsageRow(
        owner=row["owner"],
        key_id=row["key_id"],
        model=row["model"],
        execution=row["execution"],
        tier=row["tier"],
        usage=Usage(
            input=row["input"],
            cached=row["cached"],
            output=row["output"],
            reasoning=row["reasoning"],
        ),
        batch_id=row["batch_id"],
        custom_id=row["custom_id"],
        at=row["at"],
        team_id=row["team_id"],
        user_id=row["user_id"],
        cost=row["cost"],
        price=row["price"],
    )
