"""The composition root: the only file that sees every floor. It only wires."""

from __future__ import annotations

import gc
import ipaddress
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import anyio
import structlog
import uvicorn
from anyio.abc import TaskStatus

from tidemill import clock, prices, telemetry
from tidemill.backends.executors import LocalExecutor
from tidemill.backends.fleet import open_fleet
from tidemill.backends.guard import GuardedExecutor, permits
from tidemill.backends.inference import LocalInference
from tidemill.backends.local import LocalBackend
from tidemill.backends.member import Member
from tidemill.backends.providers import Providers
from tidemill.backends.registry import BackendRegistry
from tidemill.backends.routed import RoutedInference
from tidemill.errors import SettingsError, TidemillError
from tidemill.handlers import create_app
from tidemill.handlers.deps import Services
from tidemill.handlers.heads import Doorstep
from tidemill.handlers.identity import Identities
from tidemill.handlers.issued import IssuedTokens
from tidemill.ports import Store
from tidemill.providers import parse
from tidemill.scheduler.runner import Runner
from tidemill.settings import Loaded, Settings
from tidemill.storage import open_store
from tidemill.types import PoolStatus

log = structlog.get_logger()


class Server:
    """What one running server holds, from store to engine."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        replicas: Mapping[str, Member],
        runner: Runner,
        services: Services,
        providers: Providers,
    ) -> None:
        self.settings = settings
        self.store = store
        self.replicas = replicas
        self.runner = runner
        self.services = services
        self.providers = providers
        self._stop_at: float | None = None

    def stop(self) -> None:
        """Start no line any more. The time that lines in flight have runs from here."""
        self._stop_at = clock.monotonic() + self.settings.drain_seconds
        self.runner.stop_leasing()

    async def drain(self) -> None:
        """Wait for lines in flight, as long as they still have."""
        if self._stop_at is None:
            self.stop()
        assert self._stop_at is not None
        await self.runner.drain(max(0.0, self._stop_at - clock.monotonic()))
        await self.services.arrears.close(self.store)


@asynccontextmanager
async def running(settings: Settings) -> AsyncGenerator[Server]:
    """A server without its listening socket: store taken, engines loaded, runner at work.

    Leaving drains: no line starts, those in flight get ``drain_seconds``. Raises ``SettingsError``
    or ``TidemillError`` with one sentence when something cannot start.
    """
    catalogue = prices.load(Path(settings.prices)) if settings.prices else prices.Catalogue()
    catalogue = prices.with_providers(
        catalogue,
        parse(settings.providers, azure_api_version=settings.azure_batch_api_version),
    )
    store = open_store(Path(settings.storage_path), prices=catalogue)
    await store.start()
    try:
        tokens = IssuedTokens(settings, store) if settings.oidc_issuer else None
        identities = Identities(store, settings, tokens)
        await _require_keys(settings, store, identities)
        async with (
            open_fleet(settings) as fleet,
            _providers(settings, store, catalogue) as providers,
        ):
            replicas = fleet.members
            engines = LocalInference(replicas, settings, fleet.waits)
            inference = RoutedInference((engines, *providers.routes))
            executor = GuardedExecutor(
                LocalExecutor(inference),
                store.accounts,
                store.budgets,
                prices=catalogue,
                where=inference.where,
                max_answer=settings.max_decoding_length,
            )

            def knows(model: str) -> bool:
                return inference.knows(model) or providers.batches(model)

            runner = Runner(
                store,
                executor,
                max_pool_size=settings.max_pool_size,
                max_intake_capacity=settings.max_intake_capacity,
                max_line_attempts=settings.max_line_attempts,
                lease_s=settings.lease_seconds,
                concurrency=settings.batch_local_concurrency,
                knows=knows,
                max_lines=settings.max_batch_requests,
                place=partial(providers.place_late, here=inference),
                hand_over=providers.adopt,
                permits=partial(permits, store.accounts),
            )
            fleet.on_room = runner.look_again
            if engines.duplicates is not None:
                engines.duplicates.on_wait = runner.look_again
            local = LocalBackend(
                store,
                runner,
                knows=knows,
                max_bytes=settings.max_batch_file_bytes,
                max_lines=settings.max_batch_requests,
                max_answer=settings.max_decoding_length,
                place=partial(providers.place, here=inference),
            )
            remote = providers.open_backends(local)
            services = Services(
                settings=settings,
                store=store,
                backends=BackendRegistry(local, remote),
                inference=inference,
                pool_status=_pool_status(runner, replicas),
                health=_health(store, replicas),
                identities=identities,
                prices=catalogue,
                providers=providers,
                wait_rows=runner.rows.wait,
            )
            async with anyio.create_task_group() as tasks:
                await tasks.start(runner.run)
                await tasks.start(providers.run)
                server = Server(settings, store, replicas, runner, services, providers)
                try:
                    yield server
                finally:
                    with anyio.CancelScope(shield=True):
                        await server.drain()
                    tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await store.close()


async def _require_keys(settings: Settings, store: Store, identities: Identities) -> None:
    """Without any key only this machine may come in; with none that is left, nobody."""
    loopback = settings.listen_ip == "localhost" or (
        _is_ip(settings.listen_ip) and ipaddress.ip_address(settings.listen_ip).is_loopback
    )
    keyed = bool(settings.api_keys or settings.admin_key or settings.oidc_issuer) or any(
        key.revoked_at is None for key in await store.keys.page()
    )
    if keyed:
        return
    if not await identities.open_to_all():
        log.warning("every API key is revoked: nobody is let in until one is added")
        return
    if not loopback and not settings.insecure:
        raise SettingsError(
            f"Refusing to listen on {settings.listen_ip} without any API key: set "
            "TIDEMILL_API_KEYS, add one with 'tidemill keys add', or pass --insecure."
        )
    reach = "this machine only" if loopback else "everybody"
    log.warning(f"no API key is configured: the server answers {reach}, all as one owner")


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@asynccontextmanager
async def _providers(
    settings: Settings, store: Store, catalogue: prices.Catalogue
) -> AsyncGenerator[Providers]:
    providers = Providers(settings, store, catalogue)
    try:
        yield providers
    finally:
        with anyio.CancelScope(shield=True):
            await providers.close()


def _pool_status(
    runner: Runner, replicas: Mapping[str, Member]
) -> Callable[[], Awaitable[PoolStatus]]:
    async def status() -> PoolStatus:
        pool, intake = runner.pool, runner.intake_pool
        return PoolStatus(
            intake_pool_size=intake.size,
            intake_pool_capacity=intake.capacity,
            scheduling_pool_active=pool.active,
            scheduling_pool_free=pool.capacity - pool.active,
            scheduling_pool_capacity=pool.capacity,
            active_batches=runner.active_batches,
            lines_per_second=round(runner.rate.per_second(), 3),
            drain_rate=round(runner.rate.measured, 3),
            replicas={name: replica.status() for name, replica in replicas.items()},
        )

    return status


def _health(store: Store, replicas: Mapping[str, Member]) -> Callable[[], str | None]:
    def reason() -> str | None:
        if (trouble := store.healthy()) is not None:
            return trouble
        for name, replica in replicas.items():
            status = replica.status()
            if not status.healthy:
                return f"The engine of model '{name}' is down: {status.reason or 'unknown reason'}"
        return None

    return reason


# --- the process ------------------------------------------------------------------------------


class _HttpServer(uvicorn.Server):
    """Leaves signals to us, because uvicorn would end the process before the drain; and says
    where it listens once it does."""

    def __init__(self, config: uvicorn.Config, announce: str) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._announce, flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(loaded: Loaded) -> None:
    """Run a server until SIGTERM or SIGINT, then drain. Blocks.

    Raises ``SettingsError`` or ``TidemillError`` with one sentence when it cannot start.
    """
    telemetry.configure_logging(loaded.settings)
    try:
        anyio.run(_serve, loaded.settings, backend_options={"use_uvloop": True})
    except BaseExceptionGroup as group:
        raise _first(group) from group


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that a start failed with, out of its task groups."""
    matched: BaseException = group.subgroup((SettingsError, TidemillError)) or group
    while isinstance(matched, BaseExceptionGroup):
        matched = matched.exceptions[0]
    return matched


async def _serve(settings: Settings) -> None:
    listener = _bind(settings.listen_ip, settings.listen_port)
    try:
        async with running(settings) as server:
            _settle_memory()
            config = uvicorn.Config(
                create_app(server.services),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
                timeout_keep_alive=75,
                http=Doorstep,
                ws="none",
            )
            http = _HttpServer(config, f"Tidemill listens on {_url(listener)}")
            async with anyio.create_task_group() as tasks:
                await tasks.start(_stop_on_signal, http, server)
                await http.serve(sockets=[listener])
                tasks.cancel_scope.cancel()
    finally:
        listener.close()


def _settle_memory() -> None:
    """Keep the collector from walking all modules again and again: with what start-up built out of
    its sight, a full collection no longer stops the event loop for long."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


async def _stop_on_signal(
    http: uvicorn.Server, server: Server, *, task_status: TaskStatus[None]
) -> None:
    """The first signal drains, the second ends connections at once."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            if http.should_exit:
                http.force_exit = True
                continue
            log.info("stopping", signal=signal.Signals(number).name)
            server.stop()
            http.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(info[4])
        listener.set_inheritable(False)
    except OSError as exc:
        raise SettingsError(
            f"Cannot listen on {host}:{port} ({exc.strerror or exc}); "
            "choose another --host or --port."
        ) from exc
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
