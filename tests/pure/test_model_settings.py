"""Local models as settings: what is accepted, and the one sentence for what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill import models, settings
from tidemill.errors import SettingsError
from tidemill.settings import Settings
from tidemill.types import Adapter, EngineSpec


def served(**given: Any) -> list[tuple[str, str, bool, bool]]:
    """Model, name, kind and preload of what such settings serve."""
    return [
        (one.spec.model, one.spec.name, one.spec.embedding, one.preload)
        for one in models.wanted(Settings(**given))
    ]


def test_without_a_word_the_embedded_model_is_served() -> None:
    """And the two plain settings name a chat model and one for embeddings."""
    assert served() == [("smollm2", "", False, True)]
    assert served(model="m.gguf", model_name="n", embedding_model="e.gguf") == [
        ("m.gguf", "n", False, True),
        ("e.gguf", "", True, True),
    ]


def test_entries_are_served_beside_a_model_that_is_named_and_else_alone() -> None:
    """The first model of all is there from the start, and what asks for it."""
    entries = [{"model": "a.gguf"}, {"model": "b.gguf", "name": "b"}]
    entries.append({"model": "e.gguf", "embedding": True, "preload": True})
    text = json.dumps(entries)
    alone = served(models=text)
    assert [one[3] for one in alone] == [True, False, True]
    beside = served(models=text, model="m.gguf")
    assert beside[0] == ("m.gguf", "", False, True)
    assert [one[3] for one in beside[1:]] == [False, False, True]
    assert served(models=json.dumps([{"model": "a", "preload": False}])) == [
        ("a", "", False, False)
    ]


def test_what_an_entry_leaves_open_the_general_settings_say() -> None:
    """Each field by itself; zero is an answer, too."""
    adapter = {"path": "law.gguf", "scale": 0.5, "name": "law"}
    entry = {"model": "a", "slots": 0, "weights": "as-is", "adapters": [adapter]}
    general = Settings(models=json.dumps([entry]), slots=4, threads=3, max_context_length=512)
    (one,) = models.wanted(general)
    assert one.spec == EngineSpec(
        model="a",
        slots=0,
        threads=3,
        context_length=512,
        step_timeout_s=600.0,
        weights="as-is",
        adapters=(Adapter(path="law.gguf", scale=0.5, name="law"),),
    )


def test_tables_of_the_file_are_entries(tmp_path: Path) -> None:
    """TOML and JSON say the same."""
    file = tmp_path / "tidemill.toml"
    file.write_text('[[models]]\nmodel = "smollm2"\nname = "base"\n', encoding="utf-8")
    loaded = settings.load(env={}, toml=file)
    assert models.parse(loaded.settings.models) == (models.Model(model="smollm2", name="base"),)
    again = settings.load(env={"TIDEMILL_MODELS": '[{"model": "x"}]'}, toml=file)
    assert models.parse(again.settings.models) == (models.Model(model="x"),)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ("{", "setting 'models': not JSON"),
        ({"model": "a"}, r"it is a list of tables, each under \[\[models\]\]"),
        (["a"], r"entry 1: Expected `object`"),
        (
            [{"model": "a"}, {"name": "n"}],
            r"entry 2 \('n'\): .* required field `model`",
        ),
        ([{"model": ""}], r"entry 1 \(''\), key 'model': Expected `str` of length >= 1"),
        ([{"model": "a", "slots": "4"}], r"entry 1 \('a'\), key 'slots': Expected `int \| null`"),
        ([{"model": "a", "slots": 999}], r"entry 1 \('a'\), key 'slots': Expected `int` <= 256"),
        ([{"model": "a", "weights": "q2"}], r"entry 1 \('a'\), key 'weights': Invalid enum value"),
        ([{"model": "a", "colour": 1}], r"entry 1 \('a'\): .* unknown field `colour`"),
        ([{"model": "a", "adapters": [{}]}], r"entry 1 \('a'\), key 'adapters': .* `path`"),
        ([{"model": "a", "name": "n"}, {"model": "b", "name": "n"}], "under the name 'n'"),
    ],
)
def test_a_bad_entry_is_named_with_its_key(entries: Any, words: str) -> None:
    """It stops the start, wherever it was written."""
    text = entries if isinstance(entries, str) else json.dumps(entries)
    with pytest.raises(SettingsError, match=words):
        settings.load(env={"TIDEMILL_MODELS": text})


def test_one_name_may_have_a_model_for_chats_and_one_for_embeddings() -> None:
    """They are told apart by what is asked."""
    pair = [{"model": "a", "name": "n"}, {"model": "b", "name": "n", "embedding": True}]
    assert len(models.parse(json.dumps(pair))) == 2
