"""The header of a GGUF, read without llama.cpp: what a model is before anything is loaded."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from tidemill.errors import SettingsError

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LONGEST = 4096
"""Arrays beyond this are vocabularies, and passed over."""


class Header:
    """Metadata, and how many weights there are."""

    def __init__(self, meta: dict[str, Any], parameters: int) -> None:
        """``parameters``: numbers in all tensors of this file together."""
        self.meta = meta
        self.parameters = parameters

    @property
    def architecture(self) -> str:
        """Empty where the file does not say."""
        return str(self.meta.get("general.architecture", ""))

    def number(self, name: str, default: int = 0) -> int:
        """A whole number that the architecture has, as ``context_length``."""
        value = self.meta.get(f"{self.architecture}.{name}", default)
        return int(value) if isinstance(value, int | float) else default

    @property
    def file_type(self) -> int | None:
        """llama.cpp's number for the format of most weights."""
        found = self.meta.get("general.file_type")
        return found if isinstance(found, int) else None

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory for one token of one sequence: keys and values of all layers, 16 bits each."""
        layers, heads = self.number("block_count"), max(1, self.number("attention.head_count"))
        width = self.number("embedding_length") // heads
        each = self.number("attention.key_length", width)
        each += self.number("attention.value_length", width)
        per_layer = self.meta.get(f"{self.architecture}.attention.head_count_kv", heads)
        kv_heads = sum(per_layer) if isinstance(per_layer, list) else int(per_layer) * layers
        return kv_heads * each * 2

    @property
    def template(self) -> str | None:
        """The chat template."""
        found = self.meta.get("tokenizer.chat_template")
        return found if isinstance(found, str) else None


def read(path: Path, what: str = "model") -> Header:
    """The header of a file. Raises ``SettingsError`` with one sentence, which calls the file
    ``what``, when it has none."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except OSError as exc:
        raise SettingsError(f"Cannot read the {what} {path}: {exc.strerror or exc}.") from exc
    except (struct.error, ValueError, KeyError, IndexError, OverflowError) as exc:
        raise SettingsError(f"The {what} {path} is not a GGUF file, or it is cut off.") from exc


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def header(self) -> Header:
        if self._data[:4] != b"GGUF":
            raise ValueError("no GGUF")
        self._at = 4
        version = self._scalar("I")
        if version < 2:
            raise ValueError("lengths had 32 bits then")
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        meta = {}
        for _ in range(pairs):
            key = self._string()
            meta[key] = self._value(self._scalar("I"))
        return Header(meta, sum(self._tensor() for _ in range(tensors)))

    def _tensor(self) -> int:
        self._string()
        numbers = 1
        for _ in range(self._scalar("I")):
            numbers *= self._scalar("Q")
        self._at += 12  # type and offset
        return numbers

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        return self._scalar(_SCALARS[kind])

    def _array(self, kind: int, n: int) -> list[Any] | None:
        if n <= _LONGEST:
            return [self._value(kind) for _ in range(n)]
        if kind == _STRING:
            for _ in range(n):
                self._skip(self._scalar("Q"))
        elif kind == _ARRAY:
            raise ValueError("arrays of arrays are not used")
        else:
            self._skip(n * struct.calcsize("<" + _SCALARS[kind]))
        return None

    def _string(self) -> str:
        start, size = self._at + 8, self._scalar("Q")
        self._skip(size)
        return self._data[start : start + size].decode("utf-8", "replace")

    def _scalar(self, code: str) -> Any:
        one = struct.Struct("<" + code)
        (value,) = one.unpack_from(self._data, self._at)
        self._at += one.size
        return value

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            raise ValueError("cut off")
