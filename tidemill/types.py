"""The records that travel between floors.

Every record is a frozen, keyword-only ``msgspec.Struct``. Times are integer epoch seconds and end
in
``_at``; durations are seconds and end in ``_s``; ``id`` is a wire id, ``seq`` and ``no`` are
database orders.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from enum import IntEnum, StrEnum
from typing import Any, Literal

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: immutable, built by keyword."""


# --- who --------------------------------------------------------------------------------------


class Lane(IntEnum):
    """Who goes first on the engine: a lower value wins."""

    INTERACTIVE = 0
    JOB = 1
    BATCH = 2


class Limits(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The most that one team, user or key may do; None: it sets no limit of its own.

    What a request may do is what its key, its team and its user all allow. Names of models may end
    in ``*``. See ``tidemill.access``.
    """

    models: tuple[str, ...] | None = None
    providers: dict[str, tuple[str, ...]] | None = None
    """Models by provider, ``local`` being one; a provider that is not named may not be used."""
    lane: Lane = Lane.INTERACTIVE
    """The best lane that interactive requests get."""
    requests_per_minute: int | None = None
    """Interactive requests only: batch lines do not count."""
    tokens_per_minute: int | None = None
    enqueued_lines: int | None = None
    """Lines of batches that have not ended, over all batches."""
    enqueued_tokens: int | None = None
    storage_bytes: int | None = None
    """Bytes of the input files that the owner keeps."""
    monthly_budget: int | None = None
    """Micro-units of currency per calendar month, UTC."""


AccountKind = Literal["team", "user"]


class Account(Record, frozen=True, kw_only=True):
    """A team or a user: what keys belong to, and where limits and budgets hang."""

    kind: AccountKind
    id: str
    name: str
    limits: Limits = Limits()
    created_at: int = 0
    closed_at: int | None = None
    """Its keys have been useless since then; what it owns stays."""


class Principal(Record, frozen=True, kw_only=True):
    """Who is asking. ``owner`` is the only thing that access checks compare."""

    owner: str
    name: str
    key_id: str | None = None
    scopes: frozenset[str] = frozenset()
    team_id: str | None = None
    user_id: str | None = None
    limits: tuple[Limits, ...] = ()
    """Of the key, its team and its user: each holds."""


class Actor(Record, frozen=True, kw_only=True):
    """Who does something that the audit trail keeps; the entry is in the commit that does it."""

    id: str
    """Id of the key, or the owner where a request has none; ``cli`` for this machine's operator."""
    request_id: str | None = None


SERVER = Actor(id="server")
"""Takes back what an actor began and a provider then did not take."""


class KeyRecord(Record, frozen=True, kw_only=True):
    """An API key as stored: the secret itself is never kept, only its SHA-256."""

    id: str
    name: str
    owner: str
    prefix: str
    """First characters of the secret, for display."""
    digest: str
    """Hex SHA-256 of the secret."""
    scopes: frozenset[str] = frozenset()
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None
    team_id: str | None = None
    user_id: str | None = None
    limits: Limits = Limits()
    last_used_at: int | None = None
    """To about a minute: it is not written for each request."""


class Grant(Record, frozen=True, kw_only=True):
    """A key with the team and the user that it belongs to, read together."""

    key: KeyRecord
    team: Account | None = None
    user: Account | None = None


# --- states -----------------------------------------------------------------------------------


class BatchStatus(StrEnum):
    """States of a batch. ``EXPIRING`` is ours only: the wire shows it as ``finalizing``."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    EXPIRING = "expiring"
    EXPIRED = "expired"


TERMINAL = frozenset(
    {BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.CANCELLED, BatchStatus.EXPIRED}
)


class LineState(StrEnum):
    """States of one line of a batch."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


# --- placement --------------------------------------------------------------------------------


Execution = Literal["auto", "local", "provider"]
"""What a client asks for: forward where possible, run here, or forward or fail."""


class Placement(Record, frozen=True, kw_only=True):
    """Where a file's batch runs, and why, in words for the client."""

    execution: Literal["local", "provider"] = "local"
    backend: str = "local"
    provider: str | None = None
    reason: str = "no provider serves a batch API for these models"
    fallback: bool = False
    """True: a refusal by the provider, at once or later, re-runs the batch here."""


# --- problems ---------------------------------------------------------------------------------


class Problem(Record, frozen=True, kw_only=True):
    """One thing wrong with an input file; also the shape of ``batch.errors.data[]`` and
    ``error.errors.data[]``."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


# --- files ------------------------------------------------------------------------------------

FileKind = Literal["input", "output", "error"]


class NewFile(Record, frozen=True, kw_only=True):
    """What is known about a file before its bytes arrive."""

    owner: str
    filename: str
    purpose: str = "batch"
    expires_after_s: int | None = None
    """Seconds from creation to expiry; None means the default of 30 days for purpose ``batch``."""
    by: Actor | None = None
    quota: int | None = None
    """Bytes of input files that the owner may keep, with this one."""


class FileFacts(Record, frozen=True, kw_only=True):
    """What the check of an input file found; written when its draft is committed."""

    lines: int
    """Requests in the file; blank lines are not counted."""
    models: tuple[str, ...] = ()
    endpoint: str | None = None
    """The one url of all lines in canonical form (``/v1/...``); None when unchecked or mixed."""
    max_line_bytes: int = 0
    placement: Placement = Placement()
    checked: bool = True
    """False when ``validation = "batch"`` left the checking to the batch."""
    asked: Execution = "auto"
    """Of an unchecked file: where its batch shall run, once its models are known."""
    asked_provider: str | None = None


class FileRecord(Record, frozen=True, kw_only=True):
    """A stored file: an uploaded input or a batch's results."""

    seq: int
    id: str
    owner: str
    filename: str
    purpose: str
    kind: FileKind
    bytes: int
    created_at: int
    expires_at: int | None
    facts: FileFacts
    batch_id: str | None = None
    """The batch whose results these are; None for an input file."""


class Upload(Record, frozen=True, kw_only=True):
    """A file on its way in: ``body`` yields its bytes once, in pieces of any size."""

    new: NewFile
    body: AsyncIterator[bytes]
    principal: Principal
    execution: Execution = "auto"
    provider: str | None = None
    validation: Literal["upload", "batch"] = "upload"
    expiry: Callable[[], int | None] | None = None
    """Asked once ``body`` has ended: seconds to expiry from a form field that came after the file
    part (openai-node sends the file first). None, or None returned: ``new.expires_after_s``."""


# --- batches ----------------------------------------------------------------------------------


class BatchParams(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults for the lines of one batch; a line's own body wins, the server's settings lose."""

    max_decoding_length: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_context_length: int | None = None
    deterministic: bool | None = None


class Usage(Record, frozen=True, kw_only=True):
    """Tokens. ``output`` includes ``reasoning``, ``input`` includes ``cached``."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0


class NewBatch(Record, frozen=True, kw_only=True):
    """A batch about to be opened. Everything here was checked by the handler."""

    owner: str
    key_id: str | None
    file: FileRecord
    endpoint: str
    completion_window: str = "24h"
    window_s: int = 86_400
    metadata: dict[str, str] | None = None
    params: BatchParams = BatchParams()
    output_expires_after_s: int | None = None
    idempotency_key: str | None = None
    retried: bool = False
    """True when ``x-stainless-retry-count`` marks the request as the repetition of one whose answer
    was lost."""
    allow_duplicate: bool = False
    max_cost: int | None = None
    """Micro-units; a line that would cross it does not start."""
    hold: int = 0
    """Micro-units to reserve in the budgets until the batch ends; settled costs use it up."""
    by: Actor | None = None


class BatchRecord(Record, frozen=True, kw_only=True):
    """A batch as stored. The wire object is made from it in ``tidemill.wire``."""

    seq: int
    id: str
    owner: str
    key_id: str | None
    input_file_id: str
    input_file_seq: int
    endpoint: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    metadata: dict[str, str] | None = None
    params: BatchParams = BatchParams()
    output_expires_after_s: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    """Every line that is in the error file: ran and failed, or never ran."""
    usage: Usage = Usage()
    model: str | None = None
    """The one model of all lines; None when there are several or none is known yet."""
    lines_rerun: int = 0
    """Lines that were in flight when a server died and ran again."""
    problems: tuple[Problem, ...] = ()
    """Why validation, or the batch as a whole, failed: the wire's ``errors.data``."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    placement: Placement = Placement()
    max_cost: int | None = None
    cost: int = 0
    """Micro-units booked so far."""
    held: int = 0
    """Micro-units that are still reserved; 0 once terminal."""
    waits: str | None = None
    """Why nothing becomes of it for now; said where it is shown, not stored."""


# --- lines ------------------------------------------------------------------------------------


class NewLine(Record, frozen=True, kw_only=True):
    """One request of a file as the batch's line table keeps it: where its bytes are, not a copy of
    them."""

    no: int
    """1-based line number in the uploaded file (blank lines count)."""
    offset: int
    """Byte offset of the line in the file."""
    length: int
    """Bytes, line end excluded."""
    custom_id: str
    model: str


class Lease(Record, frozen=True, kw_only=True):
    """The right to run one line once. ``token`` fences: a settlement with another token changes
    nothing."""

    batch_seq: int
    batch_id: str
    owner: str
    key_id: str | None
    no: int
    token: int
    attempt: int
    """1 on the first run."""
    custom_id: str
    line: bytes
    """The exact bytes of the input line."""
    endpoint: str
    """Canonical, e.g. ``/v1/chat/completions``."""
    expires_at: int
    params: BatchParams = BatchParams()
    capped: bool = False
    """The batch has a ``max_cost``."""


class Answer(Record, frozen=True, kw_only=True):
    """A line that was answered: the response body as JSON bytes."""

    body: bytes
    usage: Usage = Usage()
    model: str = ""
    request_id: str = ""
    execution: str = "local"
    """Where it ran: here, or the name of the provider that answered."""


class Refusal(Record, frozen=True, kw_only=True):
    """A line that was not answered; a value, since the failure of a line never fails its batch.

    ``status_code`` is the HTTP status of the refusal, or None when the line never ran (too long a
    prompt,
    expired, cancelled, out of budget): the result row then has ``response: null`` and ``error``.
    """

    code: str
    message: str
    status_code: int | None = None
    param: str | None = None
    type: str = "invalid_request_error"
    body: bytes | None = None
    """An upstream's error body, passed on as it came; None: built from the fields above."""
    retry: bool = False
    """True when running the line again may help (engine restart, 429, 5xx)."""
    retry_after_s: float | None = None
    spend: bool = True
    """False when the attempt must not count: the line was not at fault (the server drains, the
    engine is down)."""
    rest: bool = False
    """True when nothing can run now where this line was to run: its place rests for a while."""
    request_id: str = ""


Outcome = Answer | Refusal


class Settlement(Record, frozen=True, kw_only=True):
    """One line's end, ready to be stored. ``row`` is the complete result row without its line
    end."""

    batch_seq: int
    no: int
    token: int
    ok: bool
    row: bytes
    usage: Usage = Usage()
    model: str = ""
    owner: str = ""
    key_id: str | None = None
    custom_id: str = ""
    finished_at: int = 0
    execution: str = "local"
    """Where the line ran, for its usage row: ``local`` or a provider's name."""
    tier: str = "standard"
    """Price tier of its usage row: ``batch`` where a provider's batch API ran it."""


class SettledBatch(Record, frozen=True, kw_only=True):
    """What a commit of settlements did to one batch."""

    batch_seq: int
    batch_id: str
    accepted: int
    """Settlements that changed a row; the others were late or double."""
    drained: bool
    """True when no queued or running line is left: the batch moved on (the last-line rule) or, when
    it is being cancelled or expires, may end."""


class ResultRow(Record, frozen=True, kw_only=True):
    """One stored result row, for incremental reading. ``seq`` grows in commit order."""

    seq: int
    kind: Literal["output", "error"]
    row: bytes
    """Without the line end."""


class UsageRow(Record, frozen=True, kw_only=True):
    """One booked line or interactive request."""

    owner: str
    key_id: str | None
    model: str
    execution: str
    tier: str
    usage: Usage
    batch_id: str | None
    custom_id: str | None
    at: int
    team_id: str | None = None
    """Known from the key when it is booked."""
    user_id: str | None = None
    cost: int = 0
    """Micro-units, by the price in force when it is booked."""
    price: str = ""
    """Version of the catalogue that had the price; empty: none had one."""


Grouping = Literal["day", "model", "team", "user", "key", "batch", "provider", "execution", "tier"]
"""``provider`` served it, null: this server's own engines. ``execution`` is as on a batch:
``provider`` for what a provider's Batch API ran, ``local`` for what ran from here."""


class UsageQuery(Record, frozen=True, kw_only=True):
    """Which usage rows to add up (all conditions hold), and by what to group the sums."""

    since_at: int = 0
    until_at: int
    owner: str | None = None
    by: tuple[Grouping, ...] = ()


class UsageSum(Record, frozen=True, kw_only=True):
    """The sum of a group of usage rows."""

    group: dict[str, str | None]
    """Value per grouping, in the order that was asked for; a day is ``yyyy-mm-dd``, UTC."""
    rows: int
    usage: Usage
    cost: int


class Purse(Record, frozen=True, kw_only=True):
    """What a key, its team or its user has used of its limits."""

    kind: Literal["key", "team", "user"]
    id: str
    limits: Limits = Limits()
    spent: int = 0
    """Micro-units booked this month, UTC."""
    committed: int = 0
    """Micro-units that active batches have reserved, or that lines and interactive requests in
    flight may cost."""
    lines: int = 0
    """Lines of active batches that have not ended."""
    tokens: int = 0
    """Input tokens of active batches, estimated from the bytes of their files."""


class AuditEntry(Record, frozen=True, kw_only=True):
    """Who did what to which object."""

    at: int
    actor: str
    """As ``Actor.id``."""
    action: str
    """``object.verb``, e.g. ``batch.cancelled``."""
    object: str
    owner: str | None = None
    """Owner of the object, which the actor need not be; teams and users have none."""
    request_id: str | None = None
    seq: int = 0
    """Given by the store."""


# --- providers --------------------------------------------------------------------------------


class Verdict(Record, frozen=True, kw_only=True):
    """Whether a provider serves a Batch API, as its own route last answered."""

    state: Literal["yes", "no", "unknown"]
    reason: str
    checked_at: int = 0
    until_at: int = 0
    """When to ask again."""
    failures: int = 0
    """Probes in a row that said neither yes nor no."""


class UpstreamFile(Record, frozen=True, kw_only=True):
    """The provider's copy of one of our input files."""

    file_seq: int
    provider: str
    id: str
    """The provider's id; never shown to a client."""
    created_at: int
    expires_at: int | None = None


class UpstreamBatch(Record, frozen=True, kw_only=True):
    """A forwarded batch as its provider last described it. Written before the provider is asked to
    create it, so that a crash in between leaves a trace to search by."""

    batch_seq: int
    batch_id: str
    """Ours; also sent as metadata, so that a batch whose answer was lost can be found."""
    provider: str
    id: str | None = None
    """The provider's id; None while it is not known that the batch was created there."""
    status: str = ""
    """The provider's own word; empty until the first look."""
    completed: int = 0
    failed: int = 0
    output_id: str | None = None
    error_id: str | None = None
    problems: tuple[Problem, ...] = ()
    intended_at: int = 0
    looked_at: int = 0
    tries: int = 0
    """Failures in a row: of looks, or of settlements once it has ended there."""
    settled_at: int | None = None
    """When its results were booked, or it was given up; it is not looked at again."""
    input_id: str | None = None
    """A copy of the input that the provider holds for this batch alone."""
    ended_at: int = 0
    """When it ended, as the provider says; 0: it did not say."""


class Leftover(Record, frozen=True, kw_only=True):
    """Files at a provider that nobody needs any more: of a settled batch, or of an input file that
    is deleted."""

    provider: str
    ids: tuple[str, ...]
    """The provider's ids; may be empty."""
    batch_seq: int | None = None
    file_seq: int | None = None
    """Our input file whose copy is among them."""


class Page(Record, frozen=True, kw_only=True):
    """A cursor query over an owner's objects."""

    after: str | None = None
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None
    """Files only: keep this purpose."""


# --- the engine, seen from the server ---------------------------------------------------------


class Sampling(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. The default is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}


class Generation(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One completion for an engine. Exactly one of ``messages``, ``text`` and ``tokens`` is set."""

    model: str
    lane: Lane = Lane.BATCH
    messages: tuple[dict[str, Any], ...] | None = None
    """Chat messages as in the OpenAI API; the model's own template renders them."""
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: Any = None
    text: str | None = None
    """A raw prompt."""
    tokens: tuple[int, ...] | None = None
    max_tokens: int | None = None
    """None: until the end of the context."""
    max_context: int | None = None
    """A context cap below the model's own, in tokens."""
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """None: none; 0: the chosen token's; n: also the n likeliest (at most 20)."""
    json_schema: dict[str, Any] | None = None
    """Answer must match this schema; ``{}`` means any JSON object."""
    echo: bool = False
    """Prefix the answer with the prompt (``/v1/completions`` only)."""
    stream: bool = False
    """True: pieces as they come. False: one piece at the end."""
    owner: str = ""
    batch: str = ""
    """Whose line it is; lines of one batch are likely to be alike."""
    deterministic: bool = False
    """The same text on every run: computed alone, in fixed chunks, from nothing."""


class TokenLogprob(Record, frozen=True, kw_only=True):
    """The chosen token at one position, and the likeliest alternatives, with natural-log
    probabilities."""

    token: str
    logprob: float
    bytes: tuple[int, ...] = ()
    top: tuple[tuple[str, float, tuple[int, ...]], ...] = ()


FinishReason = Literal["stop", "length", "tool_calls"]


class Piece(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A part of an answer. The last one has ``finish`` and ``usage``."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    """``{"id", "type": "function", "function": {"name", "arguments"}}``, on the last piece."""
    reasoning: str = ""


class Embedding(Record, frozen=True, kw_only=True):
    """Inputs to embed: texts or token lists."""

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    lane: Lane = Lane.BATCH
    dimensions: int | None = None
    owner: str = ""


class Embedded(Record, frozen=True, kw_only=True):
    """Vectors in input order, each a list of float32-representable floats."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage = Usage()


ModelState = Literal["unloaded", "loading", "loaded", "unloading"]
"""An unloaded model is loaded when somebody asks for it."""


class ModelCard(Record, frozen=True, kw_only=True):
    """A model as ``/v1/models`` shows it."""

    id: str
    created_at: int = 0
    owned_by: str = "tidemill"
    context_length: int | None = None
    """Tokens that one request may use, prompt and answer together."""
    chat: bool = True
    embeddings: bool = False
    tools: bool = False
    """True when the model's template renders tools."""
    state: ModelState | None = None
    """Of a model of this server: whether it is in memory. None: served elsewhere."""


class ArenaStatus(Record, frozen=True, kw_only=True):
    """The memory in which an engine keeps the states of sequences that made way, in bytes."""

    kind: str = ""
    """``host``, ``cuda`` (pinned), or ``model`` where the native part was not built."""
    bytes: int = 0
    used: int = 0
    free: int = 0
    largest: int = 0
    """The largest state for which there is room now."""
    blocks: int = 0
    """States in it."""


class Waiting(Record, frozen=True, kw_only=True):
    """Batch lines that wait at one place."""

    deadline: float
    """The nearest one of their batches, epoch seconds."""
    lifted: bool = False
    """True when one of these batches would miss its deadline at its pace."""


class ReplicaStatus(Record, frozen=True, kw_only=True):
    """Health and load of one engine replica. Totals count from its creation, over restarts."""

    healthy: bool
    reason: str | None = None
    active: int = 0
    """Sequences that decode or prefill now."""
    waiting: int = 0
    slots: int = 0
    restarts: int = 0
    parked: int = 0
    """Sequences that made way and go on later from their state."""
    held: int = 0
    """Computed beginnings that nobody uses now: on free sequence ids, and conversations put
    aside."""
    arena: ArenaStatus = ArenaStatus()
    tokens_generated: int = 0
    tokens_prefilled: int = 0
    """Prompt tokens that were computed."""
    tokens_reused: int = 0
    """Prompt tokens that were there already: prefixes shared with other requests."""
    tokens_drafted: int = 0
    """Tokens that were looked up in what a sequence had said, and computed ahead."""
    tokens_accepted: int = 0
    """Those of them that were then chosen."""
    parks: int = 0
    """States written to the arena, of sequences and conversations."""
    resumes: int = 0
    """States read from it."""
    requeues: int = 0
    """Sequences that lost what was computed of them, and were computed again."""
    refused: int = 0
    """States for which the arena had no room."""
    state: ModelState = "loaded"
    memory_bytes: int = 0
    """Estimated: what the model takes while it is loaded; 0: unknown."""
    takes_lines: bool = True
    """False while it starts no batch line, because another model waits for its memory."""


class Adapter(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter that a model is served with."""

    path: str
    """A GGUF of type ``adapter``."""
    scale: float = 1.0
    """How much of it is added; 0: nothing."""
    name: str = ""
    """For whoever reads the settings."""


class EngineSpec(Record, frozen=True, kw_only=True):
    """What a replica is started with; zeros mean "choose for this machine"."""

    model: str
    """Path to a GGUF, ``smollm2``, or ``hf://org/repo/file.gguf``."""
    name: str = ""
    """Name to serve under; empty: taken from the model."""
    embedding: bool = False
    """True: an embeddings-only context."""
    gpu_layers: int = -1
    context_length: int = 0
    slots: int = 0
    long_slots: int = 0
    """Of the slots, those that hold the full context; the others may be shorter."""
    threads: int = 0
    headroom: int = 1
    """Slots that batch lines leave free."""
    step_timeout_s: float = 0.0
    """The engine is restarted when one step takes longer; 0: never."""
    weights: Literal["auto", "as-is", "q8_0", "q4_0"] = "as-is"
    """The layout of the weights; others than the model's own are made once and cached."""
    adapters: tuple[Adapter, ...] = ()
    """Added to every answer, in every context of the model."""
    speculation: Literal["auto", "off"] = "auto"
    """Whether tokens that an answer may copy are computed ahead where that pays."""
    attention: Literal["auto", "llama.cpp"] = "auto"
    """Whose code computes attention on a CPU; auto: this package's own, where it can."""


class PoolStatus(Record, frozen=True, kw_only=True):
    """``GET /v1/pool/status``; the field names are BatchGen's."""

    intake_pool_size: int
    intake_pool_capacity: int
    scheduling_pool_active: int
    scheduling_pool_free: int
    scheduling_pool_capacity: int
    active_batches: int
    pool_mode: bool = True
    lines_per_second: float = 0.0
    """Measured drain rate over the last minute."""
    drain_rate: float = 0.0
    """Lines per second as last measured while there was work; 0: nothing has been settled yet."""
    replicas: dict[str, ReplicaStatus] = {}
