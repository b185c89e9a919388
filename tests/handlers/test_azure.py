"""Azure's URLs: one store behind all surfaces, deployments with slashes, no redirects."""

from __future__ import annotations

import httpx
import pytest

from tests.handlers.world import World, line
from tidemill.handlers.azure import requoted

pytestmark = pytest.mark.anyio

MIRRORS = [
    "/v1",
    "/openai/v1",
    "/openai",
    "/jobs/v1",
    "/jobs/openai",
    "/openai/deployments/d",
    "/openai/deployments/org%2Fd",
    "/openai/deployments/org/d",
    "/openai/v1/deployments/d",
]


@pytest.mark.parametrize("mirror", MIRRORS)
async def test_the_whole_life_of_a_batch(world: World, mirror: str) -> None:
    """Statements 215 to 223, D11, C40, C102: every verb on every mirror."""
    client = world.client
    query = {"api-version": "2024-10-21"}
    uploaded = await client.post(
        f"{mirror}/files",
        params=query,
        data={"purpose": "batch"},
        files={"file": ("in.jsonl", line())},
    )
    assert uploaded.status_code == 200, uploaded.text
    file_id = uploaded.json()["id"]
    created = await client.post(
        f"{mirror}/batches",
        params=query,
        json={
            "input_file_id": file_id,
            "endpoint": "/chat/completions",
            "completion_window": "24h",
        },
    )
    assert created.status_code == 200, created.text
    batch = await world.finished(created.json()["id"])
    seen = await client.get(f"{mirror}/batches/{batch['id']}", params=query)
    assert seen.json() == batch
    assert (await client.get(f"{mirror}/batches", params=query)).json()["data"] == [batch]
    assert len((await client.get(f"{mirror}/files", params=query)).json()["data"]) == 2
    cancel = await client.post(f"{mirror}/batches/{batch['id']}/cancel", params=query)
    assert cancel.status_code == 409
    content = await client.get(f"{mirror}/files/{batch['output_file_id']}/content", params=query)
    assert content.content.count(b"\n") == 1
    assert (await client.get(f"{mirror}/batches/{batch['id']}/results")).content == content.content
    assert (await client.delete(f"{mirror}/files/{file_id}", params=query)).status_code == 200
    assert (await client.get(f"/v1/files/{file_id}")).status_code == 404


@pytest.mark.parametrize("head", ["/openai/deployments", "/openai/v1/deployments"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("completions", {"prompt": "hi"}),
        ("embeddings", {"input": "hi"}),
        ("responses", {"input": "hi"}),
    ],
)
async def test_the_deployment_is_the_model(
    world: World, head: str, path: str, body: dict[str, object]
) -> None:
    """Statements 224, 230: it beats the body's model, and one that is not served is told so."""
    answer = await world.client.post(f"{head}/echo/{path}", json={"model": "other", **body})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "echo"
    for name in ("org/other", "org%2Fother"):
        answer = await world.client.post(f"{head}/{name}/{path}", json={"model": "echo", **body})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert "org/other" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ("/openai/deployments/d/chat/completions", None),
        ("/openai/deployments/a/b/c/completions", "/openai/deployments/a%2Fb%2Fc/completions"),
        ("/openai/deployments/a/b/batches/x/cancel", "/openai/deployments/a%2Fb/batches/x/cancel"),
        ("/openai/v1/deployments/a/b/files", "/openai/v1/deployments/a%2Fb/files"),
        ("//openai//deployments/a//b/files/", "/openai/deployments/a%2Fb/files"),
        ("/openai/deployments/50%/files", "/openai/deployments/50%25/files"),
        ("/openai/deployments/files", None),
        ("/openai/deployments/d/nope", None),
        ("/v1/deployments/a/b/files", None),
        ("/v1/files", None),
    ],
)
def test_requoting(path: str, to: str | None) -> None:
    """Statement 220: a deployment is one segment, the shortest that leaves a known route."""
    assert requoted(path) == (to or path)


async def test_models_with_slashes(world: World) -> None:
    """Statement 258: ``%2F`` and a plain slash name the same model."""
    paths = ("/v1/models/org%2Fname", "/v1/models/org/name")
    answers = [await world.client.get(path) for path in paths]
    assert [answer.json()["error"]["code"] for answer in answers] == ["model_not_found"] * 2


async def test_a_token_instead_of_a_key(world: World) -> None:
    """Statement 235: without Entra set up a foreign token is a wrong key."""
    async with httpx.AsyncClient(transport=world.client._transport, base_url="http://t") as client:
        answer = await client.get("/openai/files", headers={"Authorization": "Bearer eyJ.e30.x"})
    assert answer.status_code == 401
