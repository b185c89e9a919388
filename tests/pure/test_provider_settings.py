"""Providers as settings: what is accepted, and the one sentence for what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill import providers, settings
from tidemill.errors import SettingsError

UP = {"name": "up", "kind": "openai_compatible", "base_url": "http://127.0.0.1:9/v1"}


def test_models_are_mapped_for_batch_and_for_ordinary_routes() -> None:
    """A string stands for both names, a table for each; a list maps names to themselves."""
    table = UP | {"models": {"ours": "theirs", "two": {"batch": "b", "price": None}}}
    (provider,) = providers.parse(json.dumps([table]))
    assert provider.models["ours"] == providers.Model(batch="theirs", standard="theirs")
    assert provider.batch_models() == {"ours", "two"}
    assert provider.standard_models() == {"ours"}
    (listed,) = providers.parse([UP | {"models": ["m"]}])
    assert listed.models == {"m": providers.Model(batch="m", standard="m")}


def test_an_azure_resource_is_given_with_or_without_openai_in_its_path() -> None:
    """The dialect adds the path; the dated version comes from the table or the general setting."""
    table = {"name": "az", "kind": "azure", "api_key_env": "K"}
    for url in ("https://r.openai.azure.com/", "https://r.openai.azure.com/openai/v1/"):
        (provider,) = providers.parse([table | {"base_url": url}], azure_api_version="2024-10-21")
        assert provider.base_url == "https://r.openai.azure.com"
        assert provider.api_version == "2024-10-21"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_url": "http://example.com/v1"}, "plain http"),
        ({"base_url": "https://169.254.169.254/v1"}, "metadata|link-local"),
        ({"base_url": "https://100.100.100.200/v1"}, "metadata"),
        ({"base_url": "https://[fe80::1]/v1"}, "link-local"),
        ({"base_url": "https://[::ffff:169.254.169.254]/v1"}, "link-local"),
        ({"base_url": "https://user:pw@example.com"}, "only scheme"),
        ({"base_url": "ftp://example.com"}, "must begin with https"),
        ({"base_url": "https://[bad"}, "not a URL"),
        ({"base_url": ""}, "'base_url' is missing"),
        ({"name": "local"}, "is none of"),
        ({"name": "two words"}, "a name has letters"),
        ({"kind": "acme"}, "Invalid enum value"),
        ({"kind": "openai"}, "'api_key_env' must name"),
        ({"credential": "default"}, "for kind azure only"),
        ({"concurrency": 0}, "must be positive"),
        ({"colour": "red"}, "unknown field"),
    ],
)
def test_a_bad_provider_is_refused_with_its_reason(change: dict[str, Any], words: str) -> None:
    """What can be known to be wrong without asking anybody stops the start."""
    with pytest.raises(SettingsError, match=words):
        providers.parse([UP | change])


def test_a_name_is_given_once() -> None:
    """Two providers of one name could not be told apart in a header."""
    with pytest.raises(SettingsError, match="Two providers are named 'up'"):
        providers.parse([UP, UP])


def test_providers_come_from_the_environment_or_the_file(tmp_path: Path) -> None:
    """JSON in the variable and tables in the file mean the same; both are checked at start."""
    loaded = settings.load(env={"TIDEMILL_PROVIDERS": json.dumps([UP])})
    assert providers.parse(loaded.settings.providers)[0].name == "up"
    toml = tmp_path / "tidemill.toml"
    toml.write_text(
        '[[providers]]\nname = "up"\nkind = "openai_compatible"\n'
        'base_url = "http://127.0.0.1:9/v1"\n[providers.models]\na = "b"\n'
    )
    (provider,) = providers.parse(settings.load(env={}, toml=toml).settings.providers)
    assert provider.models["a"].batch == "b"
    with pytest.raises(SettingsError, match="not JSON"):
        settings.load(env={"TIDEMILL_PROVIDERS": "[{"})
