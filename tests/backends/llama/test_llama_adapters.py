"""LoRA adapters, and what a model's files say before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.worlds.adapters import lora
from tidemill import models
from tidemill.backends.fleet import Fleet
from tidemill.backends.llama import gguf
from tidemill.backends.llama.footprint import footprint, layout
from tidemill.backends.llama.llama_replica import LlamaReplica
from tidemill.backends.llama.weights import resolve
from tidemill.errors import EngineUnavailable, SettingsError
from tidemill.settings import Settings
from tidemill.types import Adapter, EngineSpec, Sampling

pytestmark = pytest.mark.llama

SPEC = EngineSpec(model="smollm2", slots=1, context_length=64, threads=1)


def logits(adapters: Sequence[Adapter] = ()) -> NDArray[np.float32]:
    """Of the token after a prompt, on a model with these adapters."""
    from llama_cpp import llama_cpp as C

    from tidemill.backends.llama.model import Model, silence
    from tidemill.backends.llama.sampling import Chooser
    from tidemill.backends.llama.stepper import Stepper
    from tidemill.scheduler.steps import Chunk

    silence(4)
    model = Model(resolve("smollm2"), 0, adapters)
    stepper = Stepper(model, slots=1, context=64, threads=1, headroom=0)
    stepper.open()
    tokens = model.tokenize("The sea", special=True, parse=False)
    chunk: Chunk[Chooser] = Chunk(
        key=1, seq=0, start=0, tokens=tokens, chooser=Chooser(model, Sampling())
    )
    stepper.step([chunk])
    context = stepper._contexts[0].handle
    found = np.ctypeslib.as_array(C.llama_get_logits(context), shape=(model.n_vocab,)).copy()
    stepper.close()
    model.close()
    return found


def test_an_adapter_adds_as_much_as_its_scale_says(tmp_path: Path) -> None:
    """At scale 0 the numbers are the base model's, bit for bit; with a larger one they move away
    from them, and two adapters move them elsewhere than one."""
    one, two = (str(lora(tmp_path / f"{seed}.gguf", seed=seed)) for seed in (1, 2))
    base = logits()
    assert np.array_equal(logits([Adapter(path=one, scale=0.0)]), base)
    small = logits([Adapter(path=one, scale=0.1)])
    full = logits([Adapter(path=one)])
    both = logits([Adapter(path=one), Adapter(path=two)])
    assert 0 < np.abs(small - base).mean() < np.abs(full - base).mean()
    assert not np.allclose(both, full)


def test_a_file_that_is_no_adapter_of_this_model_is_refused_with_a_sentence(
    tmp_path: Path,
) -> None:
    """Before anything is loaded where the header tells, and by llama.cpp where it does not."""
    path = resolve("smollm2")
    bad: dict[str, Any] = {
        "cannot read": tmp_path / "missing.gguf",
        "is not a GGUF with a LoRA adapter": path,
        "made for architecture 'bert'": lora(tmp_path / "b.gguf", architecture="bert"),
    }
    for words, file in bad.items():
        spec = msgspec.structs.replace(SPEC, adapters=(Adapter(path=str(file)),))
        with pytest.raises(SettingsError, match=f"(?i){words}"):
            footprint(spec, path)
    with pytest.raises(SettingsError, match="is no model but of type 'adapter'"):
        footprint(SPEC, lora(tmp_path / "a.gguf"))


@pytest.mark.anyio
async def test_a_file_that_is_missing_stops_the_start_and_names_its_entry() -> None:
    """Also where its model is not to be loaded yet."""
    entries = [
        {"model": "smollm2", "preload": False, "name": "base"},
        {"model": "smollm2", "name": "law", "adapters": [{"path": "gone.gguf"}]},
    ]
    wanted = models.wanted(Settings(models=json.dumps(entries)))
    fleet = Fleet(wanted, LlamaReplica, budget=1 << 40)
    words = r"'models', entry 2 \('law'\): Cannot read the adapter gone\.gguf: No such file"
    with pytest.raises(SettingsError, match=words):
        await fleet.load_first(strict=True)
    assert fleet.members["base"].status().memory_bytes > 0


@pytest.mark.anyio
async def test_an_adapter_that_does_not_fit_stops_the_load(tmp_path: Path) -> None:
    """One sentence from the engine process; no such tensor is in the model."""
    file = lora(tmp_path / "c.gguf")
    file.write_bytes(file.read_bytes().replace(b"attn_output", b"attn_outpud"))
    spec = msgspec.structs.replace(SPEC, adapters=(Adapter(path=str(file)),))
    replica = LlamaReplica(spec)
    assert await replica.examine() > 0
    with pytest.raises(EngineUnavailable, match=r"cannot use the adapter .*c\.gguf with this"):
        await replica.start()
    await replica.close()


def test_a_header_says_what_the_loaded_model_does(model: Any) -> None:
    """The numbers that the memory is estimated from are llama.cpp's own."""
    header = gguf.read(resolve("smollm2"))
    assert header.kv_bytes_per_token == model.kv_bytes_per_token
    assert header.number("context_length") == model.n_ctx_train
    assert header.template == model.template
    assert header.parameters == 134_515_008


@pytest.mark.anyio
async def test_a_card_is_the_same_before_and_after_loading() -> None:
    """Somebody who lists the models need not wait for any of them."""
    replica = LlamaReplica(SPEC)
    await replica.examine()
    before = replica.card
    await replica.start()
    assert replica.card == before
    await replica.close()


def test_memory_is_weights_caches_and_the_process(tmp_path: Path) -> None:
    """Weights that will be rewritten count as they will be; caches follow slots and context, and
    what is parked follows the caches."""
    path = resolve("smollm2")
    as_is = footprint(msgspec.structs.replace(SPEC, weights="as-is"), path).memory_bytes
    rest = as_is - path.stat().st_size - 3 * 64 * 23_040
    assert 0 < rest < 100 << 20
    q8 = footprint(msgspec.structs.replace(SPEC, weights="q8_0"), path).memory_bytes
    assert q8 - as_is == pytest.approx(134_515_008 * 8.5 / 8 - path.stat().st_size, abs=1)
    more = footprint(msgspec.structs.replace(SPEC, weights="as-is", slots=3), path)
    assert more.memory_bytes - as_is == 4 * 64 * 23_040
    large = msgspec.structs.replace(SPEC, weights="as-is", slots=2_000, long_slots=2_000)
    assert footprint(large, path).memory_bytes - as_is == (1_999 - 1) * 64 * 23_040 + (1 << 30)


def test_weights_are_rewritten_where_that_is_asked_for_or_helps() -> None:
    """``auto``: the two slow formats, on a CPU; nothing is rewritten as what it is."""
    from llama_cpp import llama_cpp as C

    q4_0, q4_1, q5_1, q8_0 = (
        getattr(C, f"LLAMA_FTYPE_MOSTLY_{name}") for name in ("Q4_0", "Q4_1", "Q5_1", "Q8_0")
    )
    table = [
        [layout(choice, has, on_gpu=False) for has in (q4_0, q4_1, q5_1, q8_0, None)]
        for choice in ("auto", "as-is", "q8_0", "q4_0")
    ]
    assert table == [
        [None, "split", "q8_0", None, None],
        [None] * 5,
        ["q8_0", "q8_0", "q8_0", None, "q8_0"],
        [None, "q4_0", "q4_0", "q4_0", "q4_0"],
    ]
    assert layout("auto", q4_1, on_gpu=True) is None


@pytest.mark.parametrize("cut", [2, 20, 100, 5_000, 200_000])
def test_a_file_that_is_cut_off_is_no_model(tmp_path: Path, cut: int) -> None:
    """Wherever in its header it ends."""
    file = tmp_path / "cut.gguf"
    file.write_bytes(resolve("smollm2").read_bytes()[:cut])
    with pytest.raises(SettingsError, match="is not a GGUF file, or it is cut off"):
        gguf.read(file)


def test_parts_of_one_model_are_one_size(tmp_path: Path) -> None:
    """The first part names how many there are."""
    whole = resolve("smollm2").read_bytes()
    for no in (1, 2, 3):
        (tmp_path / f"m-{no:05d}-of-00003.gguf").write_bytes(whole[: 4_000_000 * no])
    spec = msgspec.structs.replace(SPEC, weights="as-is")
    parts = footprint(spec, tmp_path / "m-00001-of-00003.gguf").memory_bytes
    (tmp_path / "m.gguf").write_bytes(whole[:4_000_000])
    assert parts - footprint(spec, tmp_path / "m.gguf").memory_bytes == 4_000_000 * 5
