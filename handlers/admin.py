"""``/admin/v1``: teams, users, keys, everybody's usage and batches, the audit trail.

What an administrator does to an object leaves its owner as it is.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.params import FromPath
from msgspec import UNSET, UnsetType

from tidemill import access, clock, ids, limits, wire
from tidemill.access import ADMIN
from tidemill.errors import BadRequest, NotFound
from tidemill.handlers import usage
from tidemill.handlers.deps import Incoming, actor, body, services, whole_number
from tidemill.types import Account, AccountKind, KeyRecord, Limits

MAX_BODY_BYTES = 64 * 1024
MAX_NAME = 100
DAY_S = 86_400
PREFIX_CHARS = 7
ONLY_ADMIN = {"scope": ADMIN}

T = TypeVar("T")

_KINDS: dict[str, AccountKind] = {"teams": "team", "users": "user"}


class _Account(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    limits: dict[str, Any] | None = None


class _KeyChange(_Account, forbid_unknown_fields=True):
    days: int | UnsetType | None = UNSET


class _NewKey(_Account, forbid_unknown_fields=True):
    days: int | None = None
    team: str | None = None
    user: str | None = None
    scopes: list[str] = []


# A field that an action cannot honour is refused: nobody shall believe that it was.
_account_body = msgspec.json.Decoder(_Account)
_key_change = msgspec.json.Decoder(_KeyChange)
_new_key = msgspec.json.Decoder(_NewKey)


# --- teams and users --------------------------------------------------------------------------


@get("/{kind:str}", opt=ONLY_ADMIN)
async def list_accounts(request: Incoming, kind: FromPath[str]) -> dict[str, Any]:
    """All teams or users, closed ones too."""
    found = await services(request).store.accounts.page(_kind(kind))
    return wire.list_object([account_object(one) for one in found], has_more=False)


@post("/{kind:str}", status_code=200, opt=ONLY_ADMIN)
async def add_account(request: Incoming, kind: FromPath[str]) -> dict[str, Any]:
    """A new team or user."""
    asked = await _asked(request, _account_body)
    account = Account(
        kind=_kind(kind),
        id=ids.account_id(_kind(kind)),
        name=_name(asked.name),
        limits=_limits(asked.limits) or Limits(),
        created_at=clock.now(),
    )
    await services(request).store.accounts.add(account, await actor(request))
    return account_object(account)


@patch("/{kind:str}/{id:str}", opt=ONLY_ADMIN)
async def change_account(
    request: Incoming, kind: FromPath[str], id: FromPath[str]
) -> dict[str, Any]:
    """Give a team or user another name, or other limits as a whole."""
    asked = await _asked(request, _account_body)
    account = await _account(request, kind, id)
    changed = await services(request).store.accounts.change(
        account.id,
        name=None if asked.name is None else _name(asked.name),
        limits=_limits(asked.limits),
        by=await actor(request),
    )
    return account_object(changed or account)


@delete("/{kind:str}/{id:str}", status_code=200, opt=ONLY_ADMIN)
async def close_account(
    request: Incoming, kind: FromPath[str], id: FromPath[str]
) -> dict[str, Any]:
    """Close a team or user: its keys end, what it owns stays."""
    account = await _account(request, kind, id)
    await services(request).store.accounts.close(account.id, await actor(request))
    return account_object(await _account(request, kind, account.id))


# --- keys -------------------------------------------------------------------------------------


@get("/keys", opt=ONLY_ADMIN)
async def list_keys(request: Incoming) -> dict[str, Any]:
    """All keys, without their secrets."""
    found = await services(request).store.keys.page()
    return wire.list_object([key_object(one) for one in found], has_more=False)


@post("/keys", status_code=200, opt=ONLY_ADMIN)
async def add_key(request: Incoming) -> Response[dict[str, Any]]:
    """A new key; its secret is in this answer and nowhere else."""
    asked = await _asked(request, _new_key)
    unknown = set(asked.scopes) - access.SCOPES
    if unknown:
        raise BadRequest(
            f"Invalid value for 'scopes'. Supported values are: "
            f"{', '.join(sorted(access.SCOPES))}.",
            param="scopes",
        )
    team = None if asked.team is None else await _account(request, "teams", asked.team)
    user = None if asked.user is None else await _account(request, "users", asked.user)
    secret, id, now = ids.key_secret(), ids.key_id(), clock.now()
    team_id = None if team is None else team.id
    user_id = None if user is None else user.id
    key = KeyRecord(
        id=id,
        name=_name(asked.name),
        owner=access.owner(id, team_id, user_id),
        prefix=secret[:PREFIX_CHARS],
        digest=hashlib.sha256(secret.encode()).hexdigest(),
        scopes=frozenset(asked.scopes),
        created_at=now,
        expires_at=_expiry(asked.days, now),
        team_id=team_id,
        user_id=user_id,
        limits=_limits(asked.limits) or Limits(),
    )
    await services(request).store.keys.add(key, await actor(request))
    return Response({**key_object(key), "secret": secret}, headers={"Cache-Control": "no-store"})


@patch("/keys/{id:str}", opt=ONLY_ADMIN)
async def change_key(request: Incoming, id: FromPath[str]) -> dict[str, Any]:
    """Give a key another name, other limits as a whole, another end, or none."""
    asked = await _asked(request, _key_change)
    key = await services(request).store.keys.change(
        id,
        name=None if asked.name is None else _name(asked.name),
        limits=_limits(asked.limits),
        expires_at=UNSET if asked.days is UNSET else _expiry(asked.days, clock.now()),
        by=await actor(request),
    )
    if key is None:
        raise _no_such("Key", id)
    return key_object(key)


@delete("/keys/{id:str}", status_code=200, opt=ONLY_ADMIN)
async def revoke_key(request: Incoming, id: FromPath[str]) -> dict[str, Any]:
    """End a key; the rest of its batches' lines do not run, what it made stays."""
    store = services(request).store
    await store.keys.revoke(id, await actor(request))
    grant = await store.accounts.grant(id)
    if grant is None:
        raise _no_such("Key", id)
    return key_object(grant.key)


# --- what everybody does ----------------------------------------------------------------------


@get("/usage", opt=ONLY_ADMIN)
async def all_usage(request: Incoming) -> Response[bytes]:
    """As ``/v1/usage``, over all owners or for ``?owner=``."""
    return await usage.report(request, request.query_params.get("owner") or None)


@get("/audit", opt=ONLY_ADMIN)
async def audit(request: Incoming) -> dict[str, Any]:
    """The trail from ``?after=`` on, oldest first; ``?object=`` keeps what concerns one id."""
    limit = whole_number(request, "limit", 100, 1, 1000)
    entries = await services(request).store.audit.page(
        after=whole_number(request, "after", 0, 0, 2**63 - 1),
        limit=limit + 1,
        object=request.query_params.get("object") or None,
    )
    return {
        "object": "list",
        "data": [msgspec.to_builtins(entry) for entry in entries[:limit]],
        "has_more": len(entries) > limit,
    }


@post("/batches/{batch_id:str}/cancel", status_code=200, opt=ONLY_ADMIN)
async def cancel_batch(request: Incoming, batch_id: FromPath[str]) -> dict[str, Any]:
    """Cancel anybody's batch; it stays its owner's."""
    given = services(request)
    batch = await given.store.batches.get(batch_id, None)
    if batch is None:
        raise _no_such("Batch", batch_id)
    backend = given.backends.named(batch.placement.backend)
    cancelled = await backend.cancel(batch, await actor(request))
    return {**wire.batch_object(cancelled), "owner": cancelled.owner}


ROUTES = (
    list_keys,
    add_key,
    change_key,
    revoke_key,
    all_usage,
    audit,
    cancel_batch,
    list_accounts,
    add_account,
    change_account,
    close_account,
)


# --- objects ----------------------------------------------------------------------------------


def account_object(account: Account) -> dict[str, Any]:
    """A team or user."""
    return {
        "id": account.id,
        "object": account.kind,
        "name": account.name,
        "limits": limits.written(account.limits),
        "created_at": account.created_at,
        "closed_at": account.closed_at,
    }


def key_object(key: KeyRecord) -> dict[str, Any]:
    """A key without its secret and without the secret's hash."""
    return {
        "id": key.id,
        "object": "key",
        "name": key.name,
        "owner": key.owner,
        "prefix": key.prefix,
        "team": key.team_id,
        "user": key.user_id,
        "scopes": sorted(key.scopes),
        "limits": limits.written(key.limits),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "last_used_at": key.last_used_at,
    }


# --- what was sent ----------------------------------------------------------------------------


async def _asked(request: Incoming, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(await body(request, MAX_BODY_BYTES))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(f"The body is not what is needed here: {exc}.") from None


def _kind(kind: str) -> AccountKind:
    if kind not in _KINDS:
        raise NotFound("There are teams, users and keys.", code="unknown_url")
    return _KINDS[kind]


async def _account(request: Incoming, kind: str, id: str) -> Account:
    found = await services(request).store.accounts.get(_kind(kind), id)
    if found is None:
        raise _no_such(_kind(kind).capitalize(), id)
    return found


def _name(name: str | None) -> str:
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise BadRequest(f"'name' is a text of 1 to {MAX_NAME} printable characters.", param="name")
    return name


def _limits(fields: dict[str, Any] | None) -> Limits | None:
    try:
        return None if fields is None else limits.parse(fields)
    except ValueError as exc:
        raise BadRequest(f"Invalid limits: {exc}.", param="limits") from None


def _expiry(days: int | None, now: int) -> int | None:
    if days is not None and not 0 <= days <= 36_500:
        raise BadRequest("'days' is 0 to 36500.", param="days")
    return None if days is None else now + days * DAY_S


def _no_such(what: str, id: str) -> NotFound:
    return NotFound(f"No such {what} object: {id[:200]}", param="id")
