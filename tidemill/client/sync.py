"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from tidemill.client import core
from tidemill.client.core import Call, Flow, Json, Lost, Pause, Reply, Retries
from tidemill.client.transport import lost, lower, options, request

T = TypeVar("T")
OnPoll = Callable[[Json], None]


class TidemillClient:
    """Files and batches of one server, as plain dictionaries.

    ``base_url`` may end in ``/v1`` or not. ``timeout`` is in seconds. A 429 is repeated up to
    ``max_retries`` times after 1, 2, 4, 8, 16 s or what ``Retry-After`` says, a broken connection
    up to ``connection_retries`` times. Errors are ``ClientError``, a ``RuntimeError``.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:10900",
        api_key: str | None = None,
        timeout: float = 600.0,
        *,
        max_retries: int = core.MAX_RETRIES,
        connection_retries: int = core.MAX_RETRIES,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = core.root_url(base_url)
        self._http = httpx.Client(**options(self.root, api_key, timeout))
        self._retries = Retries(max_retries, connection_retries)
        self._sleep = sleep
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # --- files --------------------------------------------------------------------------------

    def upload_file(
        self,
        file: str | Path | bytes,
        purpose: str = "batch",
        *,
        filename: str | None = None,
        expires_after_s: int | None = None,
    ) -> Json:
        """Upload a path (streamed from disk) or bytes. Raises ``ApiError`` with ``problems``."""
        call = core.upload_call(core.source(file, filename), purpose, expires_after_s)
        return self._json(call)

    def get_file(self, file_id: str) -> Json:
        """The file object."""
        return self._json(Call("GET", core.file_path(file_id)))

    def list_files(
        self,
        *,
        limit: int | None = None,
        after: str | None = None,
        order: str | None = None,
        purpose: str | None = None,
    ) -> Json:
        """One page of files: ``data``, ``has_more``, ``last_id``."""
        return self._json(
            core.page_call("/v1/files", limit=limit, after=after, order=order, purpose=purpose)
        )

    def delete_file(self, file_id: str) -> Json:
        """Delete a file."""
        return self._json(Call("DELETE", core.file_path(file_id)))

    def download_file_content(self, file_id: str) -> bytes:
        """The bytes of a file, in memory; see ``download_file`` for large ones."""
        call = Call("GET", core.file_path(file_id, "/content"))
        return self._run(core.send(call, self._retries)).body

    def download_file(self, file_id: str, path: str | Path) -> Path:
        """Stream a file to ``path``, which appears when it is whole."""
        call = Call("GET", core.file_path(file_id, "/content"), sink=Path(path))
        self._run(core.send(call, self._retries))
        return Path(path)

    # --- batches ------------------------------------------------------------------------------

    def create_batch(
        self,
        input_file_id: str,
        endpoint: str = "/v1/chat/completions",
        completion_window: str = "24h",
        max_decoding_length: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        max_context_length: int | None = None,
        metadata: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Json:
        """Create a batch. The sampling arguments are defaults for lines that give none."""
        fields.update(
            max_decoding_length=max_decoding_length,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_context_length=max_context_length,
            metadata=metadata,
        )
        return self._json(core.create_call(input_file_id, endpoint, completion_window, fields))

    def preflight(self, file: str | Path | bytes, *, filename: str | None = None) -> Json:
        """What would become of a file: ``ok``, ``problems``, ``placement``, ``models``, ``cost``,
        ``budget``. Nothing is kept."""
        return self._json(core.preflight_call(core.source(file, filename)))

    def get_batch(self, batch_id: str) -> Json:
        """The batch as it is now."""
        return self._json(Call("GET", core.batch_path(batch_id)))

    def list_batches(self, *, limit: int | None = None, after: str | None = None) -> Json:
        """One page of batches, newest first: ``data``, ``has_more``, ``last_id``."""
        return self._json(core.page_call("/v1/batches", limit=limit, after=after))

    def cancel_batch(self, batch_id: str) -> Json:
        """Begin to cancel. Lines in flight finish and are kept."""
        return self._json(Call("POST", core.batch_path(batch_id, "/cancel")))

    def wait_for_batch(
        self,
        batch_id: str,
        poll_interval: float = 10.0,
        timeout: float | None = None,
        *,
        on_poll: OnPoll | None = None,
    ) -> Json:
        """Wait for the batch's end; ``on_poll`` sees every state. Raises ``WaitTimeout``."""
        return self._run(
            core.wait(batch_id, poll_interval, timeout, self._clock, on_poll, self._retries)
        )

    def results(
        self, batch_id: str, *, follow: bool = True, after: str = "0", wait_s: int = 20
    ) -> Iterator[bytes]:
        """Result rows as JSON bytes, answers and failures, in the order they were finished.

        With ``follow`` the iteration goes on until the batch has ended; the server is asked to
        wait up to ``wait_s`` for each next row.
        """
        last = False
        while not last:
            page = self._run(
                core.rows_page(batch_id, after, wait_s if follow else 0, self._retries)
            )
            yield from page.rows
            after, last = page.after, page.last

    def save_results(
        self, batch: Json, output_path: str | Path, error_path: str | Path | None = None
    ) -> list[Path]:
        """Download the result files of a batch that has ended; returns what was written."""
        errors = None if error_path is None else Path(error_path)
        return self._run(core.save_results(batch, Path(output_path), errors, self._retries))

    def submit_batch(
        self,
        input_file_path: str | Path,
        output_file_path: str | Path,
        max_decoding_length: int | None = None,
        *,
        endpoint: str = "/v1/chat/completions",
        completion_window: str = "24h",
        error_file_path: str | Path | None = None,
        poll_interval: float = 10.0,
        timeout: float | None = None,
        on_poll: OnPoll | None = None,
        **fields: Any,
    ) -> Json:
        """Upload, create, wait and download; returns the batch as it ended.

        Successes go to ``output_file_path``, failed lines to ``error_file_path`` where one is
        given. A batch that failed as a whole writes nothing: look at its ``errors``.
        """
        fields["max_decoding_length"] = max_decoding_length

        def create(file_id: str) -> Call:
            return core.create_call(file_id, endpoint, completion_window, fields)

        return self._run(
            core.submit(
                core.upload_call(core.source(input_file_path, None), "batch", None),
                create,
                Path(output_file_path),
                None if error_file_path is None else Path(error_file_path),
                poll_interval,
                timeout,
                self._clock,
                on_poll,
                self._retries,
            )
        )

    # --- the server ---------------------------------------------------------------------------

    def list_models(self) -> list[Json]:
        """Models served here."""
        models: list[Json] = self._json(Call("GET", "/v1/models"))["data"]
        return models

    def list_providers(self) -> list[Json]:
        """Providers of the server, with what is known of each."""
        found: list[Json] = self._json(Call("GET", "/v1/providers"))["data"]
        return found

    def pool_status(self) -> Json:
        """Load of the intake and scheduling pools."""
        return self._json(Call("GET", "/v1/pool/status"))

    def health_check(self) -> Json:
        """``{"status": "healthy"}``, or ``unhealthy`` with its reason; only no answer raises."""
        return self._run(core.health(self._retries))

    # --- the driver ---------------------------------------------------------------------------

    def _json(self, call: Call) -> Json:
        return self._run(core.send(call, self._retries)).json()

    def _run(self, flow: Flow[T]) -> T:
        answer: Reply | Lost | None = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as stop:
                value: T = stop.value
                return value
            if isinstance(step, Pause):
                self._sleep(step.seconds)
                answer = None
            else:
                answer = self._perform(step)

    def _perform(self, call: Call) -> Reply | Lost:
        try:
            with request(call) as arguments, self._http.stream(**arguments) as response:
                body = self._receive(call, response)
                return Reply(response.status_code, lower(response.headers), body)
        except httpx.TransportError as exc:
            return lost(exc)

    def _receive(self, call: Call, response: httpx.Response) -> bytes:
        if call.sink is None or response.is_error:
            return response.read()
        with core.sink_file(call.sink) as file:
            for chunk in response.iter_bytes():
                file.write(chunk)
        return b""
