"""Settings: one row each (name, default, unit, help), read from flags, environment,
``tidemill.toml``, default.

A setting is a field of ``Settings``: its ``Meta`` carries the help, and in ``extra`` the unit, the
aliases of other
systems' scripts (``LOGOS_*``), the extra flag spellings and whether it is secret. A bad or unknown
value stops the start
with one sentence that names it.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from tidemill import models, providers
from tidemill.errors import SettingsError


def _row(
    help: str,
    *,
    unit: str = "",
    aliases: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
    **bounds: Any,
) -> Meta:
    secret = bool(bounds.pop("secret", False))
    return Meta(
        description=help,
        extra={"unit": unit, "aliases": aliases, "flags": flags, "secret": secret},
        **bounds,
    )


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Effective settings of one server."""

    # --- server
    listen_ip: Annotated[str, _row("Address to listen on.", flags=("--host",))] = "127.0.0.1"
    listen_port: Annotated[
        int, _row("Port to listen on; $PORT wins.", flags=("--port",), ge=0, le=65535)
    ] = 10900
    storage_path: Annotated[str, _row("Folder of the store and of the incremental files.")] = (
        "tidemill-data"
    )
    drain_seconds: Annotated[
        float, _row("How long lines in flight may finish after SIGTERM.", unit="s", ge=0)
    ] = 20.0
    insecure: Annotated[bool, _row("Allow listening beyond loopback without any key.")] = False
    api_keys: Annotated[
        str, _row("API keys, comma-separated; each is an owner of its own.", secret=True)
    ] = ""
    admin_key: Annotated[
        str,
        _row("A key that administers: the first one, where nobody can add one.", secret=True),
    ] = ""
    prices: Annotated[
        str, _row("Price catalogue: TOML, JSON or a LiteLLM price map; empty: all is free.")
    ] = ""
    oidc_issuer: Annotated[
        str, _row("Issuer whose signed tokens are accepted as keys; empty: none.")
    ] = ""
    oidc_audience: Annotated[str, _row("Audiences that a token may be for, comma-separated.")] = ""
    oidc_jwks_url: Annotated[
        str, _row("Where the issuer's keys are; empty: found through the issuer.")
    ] = ""
    oidc_team_claim: Annotated[
        str, _row("Claim with the team's name or id; empty: tokens are personal.")
    ] = ""
    oidc_roles_claim: Annotated[str, _row("Claim with the roles of the subject.")] = "roles"
    oidc_admin_role: Annotated[str, _row("Role that administers; empty: no token does.")] = ""
    log_format: Annotated[Literal["json", "console"], _row("Shape of log lines.")] = "console"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _row("Least level that is logged.")
    ] = "info"

    # --- limits
    max_batch_file_bytes: Annotated[
        int,
        _row("Largest input file.", unit="bytes", aliases=("LOGOS_MAX_BATCH_FILE_BYTES",), ge=1),
    ] = 50 * 1024 * 1024
    max_batch_requests: Annotated[
        int,
        _row(
            "Most lines in an input file.",
            unit="lines",
            aliases=("LOGOS_MAX_BATCH_REQUESTS",),
            ge=1,
        ),
    ] = 50_000
    max_body_bytes: Annotated[
        int, _row("Largest body of an interactive request.", unit="bytes", ge=1024)
    ] = 16 * 1024 * 1024
    max_intake_capacity: Annotated[
        int, _row("Lines that may wait, over all batches.", unit="lines", ge=1)
    ] = 1_000_000
    max_pool_size: Annotated[
        int, _row("Lines that may be in processing at once.", unit="slots", ge=1)
    ] = 10_240
    validation: Annotated[
        Literal["upload", "batch"],
        _row("Where input is checked: refused at upload, or a batch that fails."),
    ] = "upload"
    allow_duplicate_batches: Annotated[
        bool, _row("Allow a second active batch of the same file.")
    ] = False
    max_line_attempts: Annotated[
        int, _row("Runs of one line before its failure is final.", ge=1)
    ] = 3
    batches_per_hour: Annotated[
        int, _row("Batches that an owner may create in an hour; 0 = any number.", ge=0)
    ] = 2_000
    window_seconds: Annotated[
        int, _row("How long the completion window 24h lasts here.", unit="s", ge=1)
    ] = 86_400
    lease_seconds: Annotated[
        float, _row("How long a line's lease lasts without a sign of life.", unit="s", gt=0)
    ] = 60.0

    # --- engine
    engine: Annotated[
        Literal["llama", "echo"],
        _row("What answers: a llama.cpp model, or the instant echo for trying things."),
    ] = "llama"
    model: Annotated[
        str,
        _row(
            "Model: path to a GGUF, 'smollm2', or hf://org/repo/file.gguf; empty: what [[models]] "
            "names, else smollm2."
        ),
    ] = ""
    model_name: Annotated[
        str, _row("Name to serve the model under; empty: taken from the model.")
    ] = ""
    embedding_model: Annotated[
        str, _row("Model for /v1/embeddings, spelled like --model; empty: the chat model.")
    ] = ""
    models: Annotated[
        str, _row("More local models as JSON; in the file, one [[models]] table each.")
    ] = ""
    memory_budget: Annotated[
        int,
        _row(
            "Memory that loaded models may take together, estimated; 0 = three quarters of the "
            "machine's.",
            unit="MiB",
            ge=0,
        ),
    ] = 0
    model_turn_seconds: Annotated[
        float,
        _row(
            "How long batch lines of a loaded model may keep those of another one waiting that "
            "does not fit beside it.",
            unit="s",
            ge=0,
        ),
    ] = 60.0
    model_wait_seconds: Annotated[
        float,
        _row("How long an interactive request waits for its model to be loaded.", unit="s", gt=0),
    ] = 120.0
    gpu_layers: Annotated[int, _row("Layers on the GPU; -1 = all.", ge=-1)] = -1
    max_context_length: Annotated[
        int,
        _row(
            "Tokens one request may use; 0 = what the model was trained for, at most 8192, "
            "and what 1 GiB holds for all slots together.",
            unit="tokens",
            ge=0,
        ),
    ] = 0
    slots: Annotated[
        int, _row("Sequences decoded together; 0 = 16 on a CPU, 64 on a GPU.", ge=0, le=256)
    ] = 0
    long_slots: Annotated[
        int,
        _row(
            "Of the slots, how many hold a request of full length where memory does not let all; "
            "0 = 2, or all when slots and length are both set.",
            ge=0,
            le=256,
        ),
    ] = 0
    threads: Annotated[int, _row("Compute threads; 0 = cores - 1.", ge=0)] = 0
    interactive_headroom: Annotated[
        int, _row("Slots kept free of batch lines for interactive requests.", ge=0)
    ] = 1
    weights: Annotated[
        Literal["auto", "as-is", "q8_0", "q4_0"],
        _row("Layout of the weights: auto rewrites what is slow on a CPU, losing next to nothing."),
    ] = "auto"
    speculation: Annotated[
        Literal["auto", "off"],
        _row("Compute ahead what an answer may copy from its prompt: where it pays, or never."),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "llama.cpp"],
        _row("Who computes attention on a CPU: code made for many sequences, or llama.cpp's."),
    ] = "auto"
    deterministic: Annotated[
        bool, _row("Every answer is computed alone: the same text on every run, one at a time.")
    ] = False
    answer_duplicates_once: Annotated[
        bool,
        _row("Lines of a batch that ask for the same, greedily, are computed once here."),
    ] = True
    step_timeout_seconds: Annotated[
        float,
        _row("The engine is restarted when one step takes longer; 0 = never.", unit="s", ge=0),
    ] = 600.0
    max_decoding_length: Annotated[
        int,
        _row(
            "Answer length where neither line nor batch gives one; 0 = to the end of the context.",
            unit="tokens",
            ge=0,
        ),
    ] = 0

    # --- providers
    providers: Annotated[
        str, _row("Providers as JSON; in the file, one [[providers]] table each.")
    ] = ""
    prefer: Annotated[
        Literal["ask", "cheapest"],
        _row("Several providers could take a batch: ask the client to name one, or the cheapest."),
    ] = "ask"
    fallback_on_quota: Annotated[
        bool, _row("Run a batch here when its provider refuses it for quota.")
    ] = False
    batch_capability_ttl_hours: Annotated[
        float,
        _row(
            "How long a provider's answer to 'do you serve a Batch API' is believed.",
            unit="h",
            aliases=("LOGOS_BATCH_CAPABILITY_TTL_HOURS",),
            gt=0,
        ),
    ] = 24.0
    batch_model_eligibility_ttl_days: Annotated[
        float,
        _row(
            "How long a model that a provider refused to batch is not sent there again.",
            unit="d",
            aliases=("LOGOS_BATCH_MODEL_ELIGIBILITY_TTL_DAYS",),
            gt=0,
        ),
    ] = 90.0
    batch_reconcile_interval_s: Annotated[
        float,
        _row(
            "Every forwarded batch is looked at at least this often.",
            unit="s",
            aliases=("LOGOS_BATCH_RECONCILE_INTERVAL_S",),
            gt=0,
        ),
    ] = 300.0
    provider_refresh_s: Annotated[
        float,
        _row("Polls of a forwarded batch reach its provider at most this often.", unit="s", ge=0),
    ] = 5.0
    azure_batch_api_version: Annotated[
        str,
        _row(
            "Dated spelling of Azure's batch routes; empty: /openai/v1.",
            aliases=("LOGOS_AZURE_BATCH_API_VERSION",),
        ),
    ] = ""

    # --- names of other systems' variables that mean something here
    batch_local_concurrency: Annotated[
        int,
        _row(
            "Lines in flight per batch runner; 0 = what the engine takes.",
            aliases=("LOGOS_BATCH_LOCAL_CONCURRENCY",),
            ge=0,
        ),
    ] = 0


class Row(msgspec.Struct, frozen=True):
    """One setting, for ``tidemill settings``, the CLI's flags and the docs."""

    name: str
    type: str
    default: Any
    unit: str
    help: str
    flags: tuple[str, ...]
    env: str
    aliases: tuple[str, ...]
    secret: bool
    choices: tuple[str, ...] = ()


def rows() -> tuple[Row, ...]:
    """The table of all settings, in their order."""
    hints = get_type_hints(Settings, include_extras=True)
    table = []
    for field in msgspec.structs.fields(Settings):
        base, meta = hints[field.name].__origin__, hints[field.name].__metadata__[0]
        choices = tuple(getattr(base, "__args__", ()))
        extra = meta.extra
        table.append(
            Row(
                name=field.name,
                type="str" if choices else base.__name__,
                default=field.default,
                unit=extra["unit"],
                help=meta.description,
                flags=("--" + field.name.replace("_", "-"), *extra["flags"]),
                env="TIDEMILL_" + field.name.upper(),
                aliases=extra["aliases"],
                secret=extra["secret"],
                choices=choices,
            )
        )
    return tuple(table)


# Environment variables of this prefix that are not settings of the server.
_OTHER_ENV = frozenset({"TIDEMILL_URL", "TIDEMILL_API_KEY", "TIDEMILL_CONFIG", "TIDEMILL_CRASH_AT"})


class Loaded(msgspec.Struct, frozen=True):
    """Settings and, per name, where the value came from (``flag``, an environment variable, a file,
    ``default``)."""

    settings: Settings
    sources: dict[str, str]


def load(
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    toml: Path | None = None,
) -> Loaded:
    """Merge flags > environment > TOML file > default.

    ``toml`` defaults to ``$TIDEMILL_CONFIG`` or ``tidemill.toml`` in the current folder where that
    exists.
    Raises ``SettingsError`` with one sentence for the first unknown or bad setting.
    """
    env = os.environ if env is None else env
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    table = {row.name: row for row in rows()}

    path = toml or (Path(env["TIDEMILL_CONFIG"]) if env.get("TIDEMILL_CONFIG") else None)
    if path is None and Path("tidemill.toml").is_file():
        path = Path("tidemill.toml")
    if path is not None:
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise SettingsError(f"Cannot read the settings file {path}: {exc.strerror}.") from exc
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise SettingsError(f"The settings file {path} is not TOML: {exc}.") from exc
        for name, value in content.items():
            if name not in table:
                raise SettingsError(
                    f"Unknown setting '{name}' in {path}; see 'tidemill settings' for the names."
                )
            if name in ("models", "providers") and isinstance(value, list | dict):
                value = msgspec.json.encode(value).decode()
            values[name], sources[name] = value, str(path)

    known_env = {row.env for row in table.values()} | _OTHER_ENV
    for name in env:
        if name.startswith("TIDEMILL_") and name not in known_env:
            raise SettingsError(
                f"Unknown setting {name} in the environment; see 'tidemill settings' for the names."
            )
    for row in table.values():
        for spelling in (*row.aliases, row.env):  # our own name wins over an alias
            if env.get(spelling, "") != "":
                values[row.name], sources[row.name] = env[spelling], f"${spelling}"
    if env.get("PORT"):
        values["listen_port"], sources["listen_port"] = env["PORT"], "$PORT"

    for name, value in (flags or {}).items():
        if name not in table:
            raise SettingsError(f"Unknown setting '{name}'.")
        if value is not None and not (name == "listen_port" and env.get("PORT")):
            values[name], sources[name] = value, "flag"

    for name, value in values.items():
        _check(table[name], value, sources[name])
    settings = msgspec.convert(values, Settings, strict=False)
    providers.parse(settings.providers, azure_api_version=settings.azure_batch_api_version)
    models.parse(settings.models)
    return Loaded(settings, {name: sources.get(name, "default") for name in table})


def _check(row: Row, value: Any, source: str) -> None:
    """Convert one value alone, so that the error can name the setting and where it came from."""
    try:
        converted = getattr(msgspec.convert({row.name: value}, Settings, strict=False), row.name)
        reason = _trouble(row, converted)
    except msgspec.ValidationError as exc:
        reason = str(exc).split(" - at")[0]
        if row.choices:
            reason = f"Expected one of {', '.join(row.choices)}"
    if reason is not None:
        shown = "" if row.secret else f" {value!r}"
        raise SettingsError(f"Bad value{shown} for setting '{row.name}' ({source}): {reason}.")


def _trouble(row: Row, value: Any) -> str | None:
    """What a type cannot say."""
    if isinstance(value, float) and not math.isfinite(value):
        return "Expected a finite number"
    # A variable that names nothing ("$A,$B" with neither set) would open the server to everybody.
    if row.name in ("api_keys", "admin_key") and value and not value.replace(",", " ").strip():
        return "There is no key in it"
    return None
