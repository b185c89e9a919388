"""Every seam of the system, on one page.

Handlers know these Protocols and never SQLite; storage implements them and never knows HTTP. The
local path and the provider path implement the same ``Backend``, so that no handler branches on
where a batch runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import UNSET, UnsetType

from tidemill.estimates import Examination
from tidemill.types import (
    Account,
    AccountKind,
    Actor,
    AuditEntry,
    BatchRecord,
    BatchStatus,
    Embedded,
    Embedding,
    Execution,
    FileFacts,
    FileRecord,
    Generation,
    Grant,
    KeyRecord,
    Lane,
    Lease,
    Leftover,
    Limits,
    LineState,
    ModelCard,
    NewBatch,
    NewFile,
    NewLine,
    Outcome,
    Page,
    Piece,
    Placement,
    Principal,
    Problem,
    Purse,
    ReplicaStatus,
    ResultRow,
    SettledBatch,
    Settlement,
    Upload,
    UpstreamBatch,
    UpstreamFile,
    Usage,
    UsageQuery,
    UsageRow,
    UsageSum,
    Waiting,
)

# --- where a batch runs -----------------------------------------------------------------------


class Backend(Protocol):
    """A place where batches run: here, or at a provider. Registered in ``backends/registry``."""

    name: str

    async def accept(self, upload: Upload) -> FileRecord:
        """Store an upload. Raises ``InvalidFile`` with every problem; nothing half-written
        stays."""

    async def open(self, new: NewBatch) -> BatchRecord:
        """Create a batch. Raises ``DuplicateActiveBatch``, ``AtCapacity`` and other
        ``TidemillError``."""

    async def refresh(self, batch: BatchRecord) -> BatchRecord:
        """The batch as it is now; for a local batch the record itself."""

    async def cancel(self, batch: BatchRecord, by: Actor | None = None) -> BatchRecord:
        """Begin to cancel. Idempotent while cancelling; raises ``NotCancellable`` when terminal."""

    def content(
        self, file: FileRecord, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """The bytes ``[start, stop)`` of a file, streamed."""


class Registry(Protocol):
    """All backends of this server: one dict, two errors."""

    async def accept(self, upload: Upload) -> FileRecord:
        """Check and store an upload, decide where its batch will run, and hand it there.

        Our own copy of the bytes is always kept. Raises ``InvalidFile`` with every problem."""

    async def examine(self, upload: Upload) -> Examination:
        """Check an upload and decide where its batch would run, as ``accept`` does; keep
        nothing."""

    def agree(
        self, file: FileRecord, who: Principal, execution: Execution, provider: str | None
    ) -> None:
        """Whether a create may ask for this of a file whose place was decided at upload. Raises
        ``Forbidden``, ``NotSupported`` or ``BadRequest`` where it would have to be ignored."""

    def named(self, name: str) -> Backend:
        """The backend of a file's or batch's placement. Raises ``NotFound`` when it is gone."""

    def shown(self, batch: BatchRecord) -> BatchRecord:
        """A batch of a list with what its provider last said of it; asks nobody."""


class ProviderDesk(Protocol):
    """What is known of this server's providers."""

    async def report(self) -> list[dict[str, Any]]:
        """Each provider with verdict, age, reason and the models that it refused to batch."""

    def ordinary(self, provider: str) -> Inference | None:
        """The ordinary routes of one provider; None where none has this name."""

    async def forget(
        self, provider: str, models: Sequence[str] | None, by: Actor | None = None
    ) -> int:
        """Forget refusals, of all models where None; returns how many. Raises ``NotFound``."""


class Executor(Protocol):
    """Runs one line, wherever it runs."""

    async def execute(self, lease: Lease) -> Outcome:
        """Never raises for the line's own failure: that is a ``Refusal``."""

    @property
    def capacities(self) -> Mapping[str, int]:
        """How many lines each place wants in flight at most (running and next in line). The
        places are always the same: each engine of this server, one for what none of them serves,
        and the providers."""

    def place(self, model: str, endpoint: str) -> str:
        """The place that runs lines for a model and an endpoint."""

    def waits(self, lines: Mapping[str, Waiting]) -> None:
        """Lines wait at these places now, and nowhere else."""


# --- models -----------------------------------------------------------------------------------


class Replica(Protocol):
    """One engine that serves one model, seen from the server's event loop.

    Built-in: ``llama`` (a supervised child process) and ``echo``. Others register at entry point
    ``tidemill.engines`` as a callable ``(EngineSpec) -> Replica``.
    """

    @property
    def card(self) -> ModelCard:
        """What ``/v1/models`` shows; complete after ``start``."""

    async def examine(self) -> int:
        """Find the model and return the bytes of memory that it will take, estimated; loads
        nothing. ``card`` then says what is known of it. Raises ``SettingsError`` with one sentence
        when a file is missing or does not fit."""

    async def start(self) -> None:
        """Load the model. Raises ``EngineUnavailable`` with one sentence when that fails."""

    async def close(self) -> None:
        """Stop at once; whoever waits gets ``EngineLost``."""

    def generate(self, generation: Generation) -> AsyncIterator[Piece]:
        """Pieces of one answer. Closing the iterator early frees the slot at the next step.

        Raises ``RequestRefused`` for what the request did wrong (``context_length_exceeded``, a
        bad schema) and ``EngineLost`` when the engine died under it: the caller may try again.
        """

    async def embed(
        self, embedding: Embedding, told: Callable[[int], None] = lambda tokens: None
    ) -> Embedded:
        """Vectors for all inputs, in order. Same errors as ``generate``. ``told``: how many tokens
        of the inputs are computed so far, for whoever does not wait for the end."""

    async def count(self, asked: Generation | Embedding) -> int:
        """Prompt tokens of a request, template included; of all inputs of an embedding."""

    def status(self) -> ReplicaStatus:
        """Health and load, without waiting."""


class Inference(Protocol):
    """Answers one OpenAI-shaped request on the models of this server: interactive routes and batch
    lines alike."""

    def cards(self) -> Sequence[ModelCard]:
        """Models served here, in configured order."""

    def knows(self, model: str) -> bool:
        """True when a request for this model can run here."""

    def where(self, model: str) -> str:
        """Where a request for this model would run: ``local`` or the name of a provider."""

    async def count(self, endpoint: str, body: bytes) -> int | None:
        """Prompt tokens of a request by the model's own tokenizer; None where it is not here or
        the request cannot run."""

    async def answer(
        self,
        endpoint: str,
        body: bytes,
        *,
        lane: Lane,
        owner: str,
        defaults: Any = None,
        model: str | None = None,
        booked: Callable[[str, Usage], None] | None = None,
        batch: str | None = None,
    ) -> Outcome:
        """Run one request to its end. ``endpoint`` is canonical; failures are a ``Refusal``.

        ``model`` (a deployment in the URL) wins over the body's. ``booked`` is told model and usage
        when the request is cancelled before its end, as far as they are known then. ``batch``: id
        of the batch that the request is a line of."""

    def stream(
        self,
        endpoint: str,
        body: bytes,
        *,
        owner: str,
        lane: Lane = Lane.INTERACTIVE,
        model: str | None = None,
        booked: Callable[[str, Usage], None] | None = None,
    ) -> AsyncIterator[bytes]:
        """Server-sent events for a request with ``stream: true``; raises ``TidemillError`` before
        the first one. ``booked`` is told model and usage once: before the events that end
        the answer, so that it can be booked before its reader has them all, or when it breaks off.
        """


# --- storage ----------------------------------------------------------------------------------


class FileDraft(Protocol):
    """A file being written; invisible until ``commit``. A dead process's are swept at start."""

    async def append(self, chunk: bytes) -> None:
        """Append bytes. Cut at line ends, at about 64 KiB: a chunk is the unit of reading."""

    async def commit(self, facts: FileFacts, *, expires_after_s: int | None = None) -> FileRecord:
        """Make the file visible, in one commit. ``expires_after_s`` wins over the one that the
        draft was opened with: in a form it may follow the bytes. Raises ``StorageQuotaExceeded``
        where the owner would keep more than the quota."""

    async def discard(self) -> None:
        """Forget it; also after a failed ``commit``."""


class Files(Protocol):
    """Files of all owners; ``owner=None``: whoever owns it (for the server, never a client)."""

    async def draft(self, new: NewFile) -> FileDraft: ...

    async def get(self, id: str, owner: str | None) -> FileRecord | None:
        """None when unknown, foreign, deleted or past its expiry."""

    async def page(self, owner: str, page: Page) -> tuple[list[FileRecord], bool]:
        """A page and whether more follow. An unknown cursor gives an empty page."""

    async def delete(self, id: str, owner: str, by: Actor | None = None) -> bool:
        """False when there was nothing to delete. Raises ``FileInUse`` while an active batch reads
        it."""

    def read(
        self, file: FileRecord, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """Bytes ``[start, stop)`` of an input or a result file, in pieces of about 64 KiB."""

    async def sweep(self, now: int) -> int:
        """Remove expired and deleted files' bytes; returns how many files went."""


class Batches(Protocol):
    """Batches. Every transition is conditional on the state that it leaves."""

    async def open(self, new: NewBatch) -> BatchRecord:
        """One commit. A repeated create gives the first batch again; otherwise an active batch of
        the file raises ``DuplicateActiveBatch`` unless ``allow_duplicate``."""

    async def repeated(self, new: NewBatch) -> BatchRecord | None:
        """The batch that this create repeats: one with the same idempotency key of the same owner,
        or, where it is ``retried``, an active or just completed batch of the same file."""

    async def get(self, id: str, owner: str | None) -> BatchRecord | None: ...

    async def page(self, owner: str, page: Page) -> tuple[list[BatchRecord], bool]: ...

    async def active(self) -> list[BatchRecord]:
        """All batches that are not terminal, oldest first."""

    async def move(
        self,
        seq: int,
        frm: frozenset[BatchStatus],
        to: BatchStatus,
        *,
        problems: Sequence[Problem] = (),
        by: Actor | None = None,
    ) -> BatchRecord | None:
        """Change state if it is one of ``frm`` and stamp the matching ``*_at``; else None.
        ``by`` is who cancels.

        Into a terminal state the same commit creates the result files: an output file when there
        is a success row, an error file when there is a failure row."""

    async def model(self, seq: int, model: str | None, total: int) -> None:
        """Record what validation found: the one model of all lines (or None), and their number."""

    async def place(self, seq: int, placement: Placement, facts: FileFacts | None = None) -> None:
        """Change where a batch runs: a provider refused it later, or its input was checked only
        now, with these ``facts``."""


class Lines(Protocol):
    """The lines of batches that run here, and their result rows."""

    async def add(self, batch_seq: int, lines: Sequence[NewLine]) -> None:
        """Add queued lines; one that is there (a restart in mid-validation) is left as it is."""

    async def lease(
        self,
        batch_seq: int,
        n: int,
        holder: str,
        until_at: int,
        models: Sequence[str] | None = None,
    ) -> list[Lease]:
        """Up to ``n`` queued lines that are due, in line order, become running; of these models
        only, where any are given."""

    async def models(self, batch_seq: int) -> list[str]:
        """The models that a batch's lines name."""

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettledBatch]:
        """One commit: line state where the token matches, result row, usage row, counters,
        last-line rule.

        A late or double settlement changes zero rows. After the commit the rows are appended to the
        incremental files. Callers of the same few milliseconds share a commit."""

    async def release(
        self, leases: Sequence[Lease], *, due_at: float = 0, spend: bool = True
    ) -> list[int]:
        """Back to queued, not before ``due_at``; ``spend=False`` gives the attempt back. Returns
        the batches (``seq``) that are cancelling or expiring: their lines must be closed."""

    async def extend(self, holder: str, until_at: int) -> None:
        """Keep alive all running lines of a holder."""

    async def reclaim(self, now: int | None) -> int:
        """Running lines whose lease lapsed go back to queued (``now=None``: all of them, at start
        of a single-server store) and count in ``lines_rerun``; returns how many."""

    async def close(
        self, batch_seq: int, to: LineState, code: str, message: str, n: int = 2000
    ) -> int:
        """Up to ``n`` queued lines become cancelled or expired, each with its row in the error
        file and counted in ``failed``; returns how many. Zero: none was left queued (some may
        still run)."""

    async def running(self, batch_seq: int) -> int:
        """Lines of the batch that run now."""

    async def queued(self) -> int:
        """Lines that wait, over all active batches: the size of the intake pool."""

    async def next_due_at(self) -> float | None:
        """When the next line that waits for its retry falls due; None when none waits."""

    async def rows(self, batch_seq: int, after: int, limit: int) -> list[ResultRow]:
        """Result rows with ``seq > after``, both kinds, in commit order."""


class Keys(Protocol):
    """API keys, by digest."""

    async def add(self, key: KeyRecord, by: Actor | None = None) -> None: ...

    async def find(self, digest: str) -> KeyRecord | None:
        """None when unknown; revoked and expired keys are returned, the caller decides."""

    async def page(self) -> list[KeyRecord]: ...

    async def revoke(self, id: str, by: Actor | None = None) -> bool: ...

    async def change(
        self,
        id: str,
        *,
        name: str | None = None,
        limits: Limits | None = None,
        expires_at: int | UnsetType | None = UNSET,
        by: Actor | None = None,
    ) -> KeyRecord | None:
        """Change what is given; what the key owns stays its. ``expires_at=None``: it never
        expires. None when there is no such key."""

    async def touch(self, seen: Mapping[str, int]) -> None:
        """Note when keys (by id) were last used; an earlier time than the known one is ignored."""


class Accounts(Protocol):
    """Teams and users, and what they and a key grant together."""

    async def add(self, account: Account, by: Actor | None = None) -> None:
        """Raises ``Conflict`` when an open account of the kind has the name."""

    async def get(self, kind: AccountKind, id_or_name: str) -> Account | None:
        """By id, or by the name of an open one."""

    async def page(self, kind: AccountKind) -> list[Account]:
        """All of a kind, closed ones too, oldest first."""

    async def change(
        self,
        id: str,
        *,
        name: str | None = None,
        limits: Limits | None = None,
        by: Actor | None = None,
    ) -> Account | None:
        """Change what is given; None when there is no such account."""

    async def close(self, id: str, by: Actor | None = None) -> bool:
        """Its keys may do nothing from now on; False when it was closed or never was."""

    async def grant(self, key_id: str) -> Grant | None:
        """A key with its team and user; None when the store has no such key."""


class Tokens(Protocol):
    """Signed tokens of an identity provider, where one is configured."""

    async def grant(self, token: str) -> Grant:
        """What a token grants; its subject becomes a key of the store. Raises ``Unauthenticated``
        for a token that is not right, ``Forbidden`` for a team that is not there."""


class Budgets(Protocol):
    """What keys, teams and users have used of their limits, and the right to use more.

    Spending is booked by ``Lines.settle``, ``Upstream.settle`` and ``Ledger.book``, in the commit
    that settles; a batch is admitted, and its estimate reserved, in the commit of
    ``Batches.open``."""

    async def purses(self, key_id: str | None) -> list[Purse]:
        """Of the key, its team and its user, as far as it has them."""

    async def hold(self, lease: Lease, amount: int) -> Literal["held", "wait", "over", "closing"]:
        """Reserve what a leased line may cost, until it is settled or released.

        ``over``: it would cross its batch's ``max_cost`` or a budget, whatever else ends.
        ``wait``: it would only if the lines in flight cost as much as they may; ask again after
        ``freed``. ``closing``: the batch starts no line any more, give the lease back."""

    async def begin(self, key_id: str, amount: int) -> int | None:
        """Reserve what an interactive request may cost, until ``Ledger.book`` takes the
        reservation back or it is released.

        None: what is in flight may use up the rest of a budget; ask again after ``freed``. Raises
        ``BudgetExceeded`` where that would not help."""

    async def release(self, reservation: int) -> None:
        """Give back what a request reserved that cost nothing."""

    async def freed(self, since: int) -> None:
        """Returns once lines or requests that held something have ended, after the count ``turn``
        was ``since``."""

    @property
    def turn(self) -> int:
        """Counts the commits that ended lines or requests; read before ``hold`` and ``begin``."""

    async def stored(self, owner: str) -> int:
        """Bytes of the input files that an owner keeps."""


class Audit(Protocol):
    """Who did what. What is done ``by`` an ``Actor`` writes its entry in its own commit, if it
    changes anything; entries are never changed."""

    async def page(
        self, *, after: int = 0, limit: int = 100, object: str | None = None
    ) -> list[AuditEntry]:
        """Entries with ``seq > after``, oldest first; ``object`` keeps those about one id."""


class Ledger(Protocol):
    """Usage rows of what ran outside a batch (batch lines are booked by ``Lines.settle``)."""

    async def book(self, rows: Sequence[UsageRow], *, reservation: int | None = None) -> None:
        """Book rows at the prices in force, in one commit; a batch's line that is booked already is
        left as it is. The true cost takes the place of what a request reserved."""

    async def usage(self, owner: str | None, since_at: int, until_at: int) -> list[UsageRow]: ...

    async def report(self, query: UsageQuery) -> list[UsageSum]:
        """Sums of usage rows by group, in the groups' order."""


class Facts(Protocol):
    """Small things worth remembering for a while: verdicts, eligibility, drain rate."""

    async def get(self, kind: str, key: str) -> tuple[bytes, int] | None:
        """Value and when it was set; None when unknown or past its time."""

    async def put(self, kind: str, key: str, value: bytes, ttl_s: int | None = None) -> None: ...

    async def forget(
        self, kind: str, key: str | None = None, by: Actor | None = None, about: str = ""
    ) -> int:
        """Forget one fact, or all of a kind; returns how many. What was known and is forgotten
        ``by`` an ``Actor`` is in the audit trail, as ``kind.forgotten`` of the object ``about``."""

    async def all(self, kind: str) -> dict[str, tuple[bytes, int]]: ...


class Upstream(Protocol):
    """What providers hold for us: ids that no client ever sees, and the latch of settlement."""

    async def file(self, file_seq: int, provider: str) -> UpstreamFile | None:
        """The provider's copy of an input file, also one that has expired there."""

    async def keep_file(self, file: UpstreamFile) -> None:
        """Record or replace the provider's copy of an input file."""

    async def batch(self, batch_seq: int) -> UpstreamBatch | None: ...

    async def keep_batch(self, batch: UpstreamBatch) -> None:
        """Record or replace; never un-settles one that is settled."""

    async def unsettled(self) -> list[UpstreamBatch]:
        """All that still have to be looked at, oldest first."""

    async def withdraw(self, batch_seq: int) -> bool:
        """Take back a batch that no provider took and that has no line: as if never created."""

    async def latch(self, batch_seq: int, until_at: int) -> bool:
        """Take the right to settle until ``until_at`` (0 gives it back); False when somebody holds
        it or it is settled."""

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettledBatch]:
        """Like ``Lines.settle`` for lines that were never leased: conditional on *queued* instead
        of on the token, so that a line is settled once however often its results are read."""

    async def leftovers(self, provider: str, n: int) -> list[Leftover]:
        """Up to ``n`` settled batches and deleted files whose copies a provider may still hold,
        oldest first."""

    async def cleared(self, leftover: Leftover) -> None:
        """The provider holds none of it any more, or never will let it go."""


class Store(Protocol):
    """One store behind all surfaces. Opening runs pending migrations or says that they are
    pending."""

    @property
    def files(self) -> Files: ...

    @property
    def batches(self) -> Batches: ...

    @property
    def lines(self) -> Lines: ...

    @property
    def keys(self) -> Keys: ...

    @property
    def ledger(self) -> Ledger: ...

    @property
    def facts(self) -> Facts: ...

    @property
    def upstream(self) -> Upstream: ...

    @property
    def accounts(self) -> Accounts: ...

    @property
    def budgets(self) -> Budgets: ...

    @property
    def audit(self) -> Audit: ...

    async def start(self) -> None:
        """Take the store (a second server on it is refused with ``StoreBusy``), migrate, sweep,
        rebuild incremental files."""

    async def close(self) -> None: ...

    def healthy(self) -> str | None:
        """None, or the reason why the store cannot be written."""


Clock = Callable[[], float]
