"""``POST /batches/preflight``: what would become of a file, without keeping it.

All problems, where its batch would run and why, tokens and cost by model, whether there is money
and room for it, and about when it would be done.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from litestar import post

from tidemill import budgets, clock
from tidemill.access import BATCH
from tidemill.errors import BadRequest, InvalidFile, NotSupported, TidemillError
from tidemill.estimates import Demand, Examination
from tidemill.handlers import allowance, estimation
from tidemill.handlers.deps import Incoming, Services, body, principal, services
from tidemill.handlers.files import execution_asked, no_such_file, provider_asked
from tidemill.handlers.form import UploadForm
from tidemill.prices import LOCAL, shown
from tidemill.types import NewFile, Placement, Principal, Problem, Upload, Usage

MAX_BODY_BYTES = 64 * 1024


@post("/batches/preflight", status_code=200, opt={"scope": BATCH})
async def preflight(request: Incoming) -> dict[str, Any]:
    """Examine an upload (a form as for ``/files``) or a stored file (``{"input_file_id": …}``)."""
    who, given = await principal(request), services(request)
    upload = Upload(
        new=NewFile(owner=who.owner, filename="preflight.jsonl"),
        body=await _content(request, given, who),
        principal=who,
        execution=execution_asked(request),
        provider=provider_asked(request),
    )
    try:
        found = await given.backends.examine(upload)
    except InvalidFile as exc:
        return _refused(exc.problems)
    except NotSupported as exc:
        return _refused((Problem(code=exc.code or "refused", message=exc.message),))
    except TidemillError as exc:
        if exc.status >= 500 or exc.code == "incomplete_body":
            raise
        problem = Problem(code=exc.code or "refused", message=exc.message, param=exc.param)
        return _refused((problem,))
    return await _report(given, who, found, stored=not _is_form(request))


ROUTES = (preflight,)


async def _content(request: Incoming, given: Services, who: Principal) -> AsyncIterator[bytes]:
    if _is_form(request):
        form = UploadForm(request)
        await form.open()
        return form.body()
    try:
        fields = msgspec.json.decode(await body(request, MAX_BODY_BYTES))
        id = fields["input_file_id"]
    except (ValueError, RecursionError, KeyError, TypeError):
        id = None
    if not isinstance(id, str):
        raise BadRequest(
            "Send the file as multipart/form-data, or the id of a stored one as "
            '{"input_file_id": "file-…"}.',
            param="input_file_id",
        )
    file = await given.store.files.get(id, who.owner)
    if file is None or file.kind != "input":
        raise no_such_file(id)
    return given.store.files.read(file)


def _is_form(request: Incoming) -> bool:
    return request.headers.get("content-type", "").startswith("multipart/")


def _refused(problems: tuple[Problem, ...]) -> dict[str, Any]:
    return {
        "object": "batch.preflight",
        "ok": False,
        "problems": [msgspec.to_builtins(problem) for problem in problems],
    }


async def _report(
    given: Services, who: Principal, found: Examination, *, stored: bool
) -> dict[str, Any]:
    facts, placement = found.facts, found.facts.placement
    demand: dict[str, Demand] = {}
    models = []
    for model, estimated in found.demand.items():
        demand[model], how = await _counted(given, found, model, estimated)
        models.append(_model(given, placement, model, demand[model], how))
    cost = estimation.cost(given, demand, placement)
    budget = await _budget(given, who, cost, found, stored=stored)
    return {
        "object": "batch.preflight",
        "ok": budget["ok"],
        "problems": [],
        "lines": facts.lines,
        "endpoint": facts.endpoint,
        "placement": {
            "execution": placement.execution,
            "provider": placement.provider,
            "reason": placement.reason,
        },
        "models": models,
        "cost": {
            "currency": given.prices.currency,
            "estimate": shown(cost),
            "batch": shown(estimation.cost(given, demand, placement, "batch")),
            "standard": shown(estimation.cost(given, demand, placement, "standard")),
        },
        "budget": budget,
        "expected_finish_at": await _finish(given, facts.lines, placement),
    }


def _model(
    given: Services, placement: Placement, model: str, demand: Demand, how: str
) -> dict[str, Any]:
    one = {model: demand}
    return {
        "model": model,
        "lines": demand.lines,
        "input_tokens": demand.usage.input,
        "input_tokens_are": how,
        "output_tokens_at_most": demand.usage.output,
        "cost_batch": shown(estimation.cost(given, one, placement, "batch")),
        "cost_standard": shown(estimation.cost(given, one, placement, "standard")),
    }


async def _counted(
    given: Services, found: Examination, model: str, estimated: Demand
) -> tuple[Demand, str]:
    """The demand of a model with its input as exact as it can be told, and how it was told."""
    endpoint = found.facts.endpoint or ""
    bodies = found.samples.get(model, ())
    if found.facts.placement.execution != LOCAL or given.inference.where(model) != LOCAL:
        return estimated, "estimated"
    counts = [await given.inference.count(endpoint, body) for body in bodies]
    exact = sum(count for count in counts if count is not None)
    if not bodies or None in counts:
        return estimated, "estimated"
    how = "tokenised"
    if estimated.lines > len(bodies):
        how = "sampled"
        told = sum(-(-len(body) // budgets.BYTES_PER_TOKEN) for body in bodies)
        exact = -(-estimated.usage.input * exact // max(told, 1))
    usage = Usage(input=exact, output=estimated.usage.output)
    return Demand(lines=estimated.lines, usage=usage), how


async def _budget(
    given: Services, who: Principal, cost: int, found: Examination, *, stored: bool
) -> dict[str, Any]:
    """Whether there is money for the estimate and room for the file and its lines, by the rules
    that an upload and a create go by."""
    try:
        if not stored:
            await allowance.upload(given, who, found.size)
        budgets.admit(
            await given.store.budgets.purses(who.key_id),
            hold=cost,
            lines=found.facts.lines,
            tokens=found.size // budgets.BYTES_PER_TOKEN,
        )
    except TidemillError as exc:
        return {"ok": False, "code": exc.code, "message": exc.message}
    return {"ok": True, "code": None, "message": None}


async def _finish(given: Services, lines: int, placement: Placement) -> int | None:
    """When the last line would be done, behind those that wait, at the measured pace; None: nothing
    was measured yet, or a provider decides."""
    if placement.execution != LOCAL:
        return None
    pool = await given.pool_status()
    waiting = pool.intake_pool_size + pool.scheduling_pool_active + lines
    if pool.drain_rate <= 0:
        return None
    return clock.now() + round(waiting / pool.drain_rate)
