"""How many slots, how much context and how many threads a machine gets."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.types import EngineSpec

pytestmark = pytest.mark.llama

MIB = 1 << 20


def size(spec: EngineSpec, *, moves: bool = True, **model: Any) -> Any:
    """The size for a model of which only these facts matter."""
    from tidemill.backends.llama.size import Size

    facts = {"kv_bytes_per_token": 23_040, "n_ctx_train": 8192, "on_gpu": False, **model}
    return Size(spec, SimpleNamespace(**facts), moves=moves)


def shape(size: Any) -> list[tuple[int, int]]:
    """Slots and context of each class."""
    return [(one.slots, one.context) for one in size.classes]


def spec(**fields: Any) -> EngineSpec:
    """A spec that leaves the rest open."""
    return EngineSpec(model="m", **fields)


@pytest.fixture(autouse=True)
def large_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 GiB."""
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * MIB}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)


def test_the_default_keeps_the_cache_within_a_gibibyte() -> None:
    """Sixteen slots share it, two of them with the full context; a large model gets less context,
    never less than one step."""
    small = size(spec())
    assert (small.slots, small.context) == (16, 8192)
    assert shape(small) == [(14, 2048), (2, 8192)]
    assert small.tokens == 14 * 2048 + 2 * 8192
    assert small.tokens * 23_040 <= 1024 * MIB
    large = size(spec(), kv_bytes_per_token=128 << 10)
    assert shape(large) == [(14, 256), (2, 2048)]
    assert large.tokens * (128 << 10) <= 1024 * MIB
    assert shape(size(spec(), kv_bytes_per_token=4 * MIB)) == [(16, 256)]


def test_one_class_where_the_memory_holds_all_or_nobody_can_move() -> None:
    """A split would only cost: a step has a pass over the weights for each class."""
    assert shape(size(spec(), n_ctx_train=2048)) == [(16, 2048)]
    assert shape(size(spec(), moves=False)) == [(16, 2816)]
    assert shape(size(spec(long_slots=3), moves=False)) == [(16, 2816)]


def test_the_number_of_long_slots_can_be_set() -> None:
    """They get what was asked for, within the memory where that is open; as many as there are
    slots: all are alike."""
    assert shape(size(spec(long_slots=4))) == [(12, 1792), (4, 5632)]
    assert shape(size(spec(long_slots=16))) == [(16, 2816)]
    assert shape(size(spec(slots=8, long_slots=1, context_length=8192))) == [(7, 2048), (1, 8192)]
    assert shape(
        size(spec(slots=4, long_slots=3, context_length=8192), kv_bytes_per_token=MIB)
    ) == [
        (1, 256),
        (3, 8192),
    ]


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
    assert small.tokens * 23_040 <= 256 * MIB
    assert small.slots == 16


def test_what_is_set_is_kept() -> None:
    """Slots and context, whatever memory they need; a context beyond the model's is the model's."""
    both = size(spec(slots=40, context_length=4096))
    assert shape(both) == [(40, 4096)]
    assert size(spec(context_length=100_000)).context == 8192


def test_a_long_context_does_not_shrink_everybody() -> None:
    """Where only the context is set, one slot or two have it, and as many short ones as the memory
    holds beside them; the last resort is one slot."""
    assert shape(size(spec(context_length=8192))) == [(14, 2048), (2, 8192)]
    long = size(spec(context_length=32_768), n_ctx_train=131_072)
    assert shape(long) == [(15, 768), (1, 32_768)]
    assert long.tokens * 23_040 <= 1024 * MIB
    assert shape(size(spec(context_length=45_000), n_ctx_train=131_072)) == [(6, 256), (1, 45_000)]
    assert shape(size(spec(context_length=8192), kv_bytes_per_token=MIB)) == [(1, 8192)]


def test_slots_that_are_set_are_there() -> None:
    """With the context open, their lengths follow from the memory."""
    assert shape(size(spec(slots=40))) == [(38, 768), (2, 8192)]
    assert size(spec(slots=200)).slots == 200


def test_what_is_parked_takes_no_more_than_what_is_at_work() -> None:
    """And 1 GiB at most; nothing where nobody is parked."""
    assert size(spec(slots=2, context_length=256), kv_bytes_per_token=100).parking == 51_200
    assert size(spec(slots=64, context_length=8192)).parking == 1 << 30
    assert size(spec(embedding=True)).parking == 0
    assert size(spec(), moves=False).parking == 0


def test_a_gpu_gets_more_slots_and_a_core_is_left_free() -> None:
    """Sixty-four on a GPU; threads are all cores but one."""
    from tidemill.backends.llama.child import default_threads

    assert size(spec(), on_gpu=True).slots == 64
    assert default_threads() == max(1, len(os.sched_getaffinity(0)) - 1)
