"""Azure's URLs: a deployment in the path, which may hold slashes, is the model.

Only its own part of the path is special; ``?api-version=`` and the ``api-key`` header are dealt
with like any unknown parameter and any key.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from litestar import Response, post
from litestar.params import FromPath

from tidemill.access import INFERENCE
from tidemill.handlers import inference
from tidemill.handlers.deps import Incoming

# The shortest deployment wins, so that "d/chat/completions" is never deployment "d/chat".
_SCOPED = re.compile(
    r"(?P<head>/openai(?:/v1)?/deployments/)(?P<deployment>.+?)"
    r"(?P<tail>/(?:chat/completions|completions|embeddings|responses|(?:batches|files)(?:/.*)?))"
)


def requoted(path: str) -> str:
    """The path with its deployment as one segment: servers hand ``%2F`` over as a slash, and
    openai-node 6 sends the slash itself.

    >>> requoted("/openai/deployments/org/model/chat/completions")
    '/openai/deployments/org%2Fmodel/chat/completions'
    """
    found = _SCOPED.fullmatch("/" + "/".join(filter(None, path.split("/"))))
    if found is None:
        return path
    return found["head"] + quote(found["deployment"], safe=" ") + found["tail"]


@post("/deployments/{deployment:str}/chat/completions", status_code=200, opt={"scope": INFERENCE})
async def chat_completions(request: Incoming, deployment: FromPath[str]) -> Response[bytes]:
    """Answer a conversation with the deployment's model, whatever the body names."""
    return await inference.serve("/v1/chat/completions", request, model=unquote(deployment))


@post("/deployments/{deployment:str}/completions", status_code=200, opt={"scope": INFERENCE})
async def completions(request: Incoming, deployment: FromPath[str]) -> Response[bytes]:
    """Continue a text with the deployment's model."""
    return await inference.serve("/v1/completions", request, model=unquote(deployment))


@post("/deployments/{deployment:str}/embeddings", status_code=200, opt={"scope": INFERENCE})
async def embeddings(request: Incoming, deployment: FromPath[str]) -> Response[bytes]:
    """Turn texts into vectors with the deployment's model."""
    return await inference.serve("/v1/embeddings", request, model=unquote(deployment))


@post("/deployments/{deployment:str}/responses", status_code=200, opt={"scope": INFERENCE})
async def responses(request: Incoming, deployment: FromPath[str]) -> Response[bytes]:
    """Answer in the shape of the Responses API with the deployment's model."""
    return await inference.serve("/v1/responses", request, model=unquote(deployment))


ROUTES = (chat_completions, completions, embeddings, responses)
