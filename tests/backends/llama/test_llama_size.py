"""How many slots, how much context and how many threads a machine gets."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.types import EngineSpec

pytestmark = pytest.mark.llama

MIB = 1 << 20


def size(spec: EngineSpec, **model: Any) -> Any:
    """The size for a model of which only these facts matter."""
    from tidemill.backends.llama.size import Size

    facts = {"kv_bytes_per_token": 23_040, "n_ctx_train": 8192, "on_gpu": False, **model}
    return Size(spec, SimpleNamespace(**facts))


def spec(**fields: Any) -> EngineSpec:
    """A spec that leaves the rest open."""
    return EngineSpec(model="m", **fields)


@pytest.fixture(autouse=True)
def large_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 GiB."""
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * MIB}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)


def test_the_default_keeps_the_cache_within_a_gibibyte() -> None:
    """Sixteen slots share it; a large model gets less context, never less than one step."""
    small = size(spec())
    assert (small.slots, small.context) == (16, 2816)
    assert small.slots * small.context * 23_040 <= 1024 * MIB
    assert size(spec(), kv_bytes_per_token=MIB).context == 256


def test_the_default_context_is_at_most_what_the_model_was_trained_for() -> None:
    """And at most 8192, where memory is no matter."""
    assert size(spec(), kv_bytes_per_token=64, n_ctx_train=512).context == 512
    assert size(spec(), kv_bytes_per_token=64, n_ctx_train=131_072).context == 8192


def test_a_small_machine_keeps_three_quarters_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one gibibyte in all, the cache takes a quarter."""
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": MIB // 4}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    small = size(spec())
    assert small.slots * small.context * 23_040 <= 256 * MIB


def test_what_is_set_is_kept() -> None:
    """Slots and context, whatever memory they need; a context beyond the model's is the model's."""
    both = size(spec(slots=40, context_length=4096))
    assert (both.slots, both.context) == (40, 4096)
    assert size(spec(context_length=100_000)).context == 8192


def test_a_long_context_gets_fewer_slots() -> None:
    """Where only the context is set, the slots follow from the memory."""
    long = size(spec(context_length=8192))
    assert (long.context, long.slots) == (8192, 5)
    assert size(spec(context_length=8192), kv_bytes_per_token=MIB).slots == 1


def test_a_gpu_gets_more_slots_and_a_core_is_left_free() -> None:
    """Sixty-four on a GPU; threads are all cores but one."""
    from tidemill.backends.llama.child import default_threads

    assert size(spec(), on_gpu=True).slots == 64
    assert default_threads() == max(1, len(os.sched_getaffinity(0)) - 1)
