"""Q4_1 as Q4_0 and a low-rank rest: the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.llama


@given(rows=st.integers(1, 5), blocks=st.integers(1, 70), seed=st.integers(0, 2**32 - 1))
def test_the_parts_add_up_to_the_whole(rows: int, blocks: int, seed: int) -> None:
    """Q4_0 + B A is the matrix, bit for bit before the sum is rounded, whatever d and m are."""
    from gguf import GGMLQuantizationType as Type
    from gguf.quants import dequantize

    from tidemill.backends.llama.split import split, sums

    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, blocks, 20), dtype=np.uint8)
    scales = random.normal(0, 0.1, (rows, blocks, 2)).astype(np.float16)
    data[..., :4] = scales.view(np.uint8)
    data = data.reshape(rows, -1)
    fast, constants = split(data)
    summing = dequantize(sums(blocks), Type.Q4_0)
    assert summing.shape == (constants.shape[1], blocks * 32)
    assert constants.shape[1] % 32 == 0
    rest = constants.astype(np.float64) @ summing.astype(np.float64)
    whole = dequantize(data, Type.Q4_1).astype(np.float64)
    parts = dequantize(fast, Type.Q4_0).astype(np.float64) + rest
    assert np.abs(whole - parts).max() <= 4 * np.spacing(np.float32(np.abs(whole).max() + 1))


def test_a_file_without_such_layers_is_refused(tmp_path: Path) -> None:
    """There is nothing to gain, and an empty adapter would be no adapter."""
    from gguf import GGUFWriter

    from tidemill.backends.llama.split import write

    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.ones((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="none of its layers are Q4_1"):
        write(tmp_path / "one.gguf", tmp_path / "two.gguf", tmp_path / "three.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["one.gguf"]
