"""The Litestar handlers: one file per route group, each route one small function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler

from tidemill.handlers import (
    admin,
    azure,
    batches,
    content,
    files,
    health,
    inference,
    models,
    pool,
    preflight,
    providers,
    results,
    usage,
)
from tidemill.handlers.deps import Services, authenticated
from tidemill.handlers.edge import Edge
from tidemill.handlers.problems import answer_error

Handlers = tuple[HTTPRouteHandler, ...]

BATCH_ROUTES: Handlers = (
    *files.ROUTES,
    *content.ROUTES,
    *batches.ROUTES,
    *preflight.ROUTES,
    *results.ROUTES,
    *pool.ROUTES,
    *providers.ROUTES,
    *usage.ROUTES,
)
INTERACTIVE_ROUTES: Handlers = (*inference.ROUTES, *models.ROUTES)

MIRRORS: tuple[tuple[str, Handlers], ...] = (
    ("/v1", BATCH_ROUTES + INTERACTIVE_ROUTES),
    ("/openai/v1", BATCH_ROUTES + INTERACTIVE_ROUTES + azure.ROUTES),
    ("/openai", BATCH_ROUTES + INTERACTIVE_ROUTES + azure.ROUTES),
    ("/jobs/v1", BATCH_ROUTES),
    ("/jobs/openai", BATCH_ROUTES),
    ("/openai/deployments/{deployment:str}", BATCH_ROUTES),
    ("/openai/v1/deployments/{deployment:str}", BATCH_ROUTES),
)
"""Every batch and file route is served below every mirror; ``/v2`` has none."""

ROUTES: Handlers = health.ROUTES
"""Routes that are served once, below the root."""

ADMIN = "/admin/v1"
"""Administration is at one place."""

Lifespan = Callable[[Litestar], AbstractAsyncContextManager[None]]


def create_app(services: Services, *, lifespan: Sequence[Lifespan] = ()) -> Litestar:
    """The ASGI application over the services of one server."""
    app = Litestar(
        route_handlers=[
            *ROUTES,
            *(Router(path, route_handlers=list(handlers)) for path, handlers in MIRRORS),
            Router(ADMIN, route_handlers=list(admin.ROUTES)),
        ],
        guards=[authenticated],
        exception_handlers={Exception: answer_error},
        lifespan=list(lifespan),
        state=State({"services": services}),
        openapi_config=None,
        logging_config=None,
        # Each route bounds its body itself: an upload has another limit than a request.
        request_max_body_size=None,
        debug=False,
    )
    app.asgi_handler = Edge(app.asgi_handler)
    return app
