"""A loaded GGUF: weights, vocabulary, facts from its header. Shared by all contexts on it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as C

from tidemill.backends.llama.markup import markers
from tidemill.errors import EngineUnavailable
from tidemill.types import Adapter


class Model:
    """Weights and vocabulary. Tokenising is safe from any thread; the rest is read-only."""

    def __init__(self, path: Path, gpu_layers: int, adapters: Sequence[Adapter] = ()) -> None:
        """Load; raises ``EngineUnavailable`` when llama.cpp refuses a file."""
        C.llama_backend_init()
        params = C.llama_model_default_params()
        self.on_gpu = on_gpu(gpu_layers)
        # llama.cpp counts the output layer too; any number above the model's own means all.
        params.n_gpu_layers = 10_000 if gpu_layers < 0 else gpu_layers
        self.handle = C.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            raise EngineUnavailable(f"llama.cpp cannot load the model {path}.")
        self.vocab = C.llama_model_get_vocab(self.handle)
        self.n_vocab = int(C.llama_vocab_n_tokens(self.vocab))
        self.n_embd = int(C.llama_model_n_embd_out(self.handle))
        self.n_ctx_train = int(C.llama_model_n_ctx_train(self.handle))
        self.template = self._template()
        self.bos = self._text_of(C.llama_vocab_bos(self.vocab))
        self.eos = self._text_of(C.llama_vocab_eos(self.vocab))
        self._pieces: dict[int, bytes] = {}
        self._markers = markers(self.template or "")
        self._adapters = [self._adapter(Path(one.path).expanduser()) for one in adapters]
        self._scales = [one.scale for one in adapters]

    def adapt(self, context: Any) -> None:
        """Let a new context compute with the model's adapters. Raises ``EngineUnavailable`` where
        they do not fit each other."""
        if not self._adapters:
            return
        n = len(self._adapters)
        handles = (C.llama_adapter_lora_p_ctypes * n)(*self._adapters)
        if C.llama_set_adapters_lora(context, handles, n, (ctypes.c_float * n)(*self._scales)):
            raise EngineUnavailable("llama.cpp cannot use the adapters of this model together.")

    def _adapter(self, path: Path) -> Any:
        handle = C.llama_adapter_lora_init(self.handle, os.fsencode(path))
        if not handle:
            raise EngineUnavailable(
                f"llama.cpp cannot use the adapter {path} with this model: it is no LoRA, or was "
                "made for another one."
            )
        return handle

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory for one token of one sequence: keys and values of all layers, 16 bits each."""
        heads = max(1, int(C.llama_model_n_head(self.handle)))
        kv_heads = int(C.llama_model_n_head_kv(self.handle))
        width = int(C.llama_model_n_embd(self.handle)) // heads
        arch = self.meta("general.architecture") or ""
        key = int(self.meta(f"{arch}.attention.key_length") or width)
        value = int(self.meta(f"{arch}.attention.value_length") or width)
        return int(C.llama_model_n_layer(self.handle)) * kv_heads * (key + value) * 2

    def meta(self, key: str) -> str | None:
        """A scalar of the GGUF's header as text; None when absent."""
        size = 1 << 12
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = C.llama_model_meta_val_str(self.handle, key.encode(), buffer, size)
            if n < 0:
                return None
            if n < size:
                return buffer.value.decode("utf-8", "replace")
            size = n + 1

    def tokenize(self, text: str, *, special: bool, parse: bool) -> list[int]:
        """Tokens of ``text``. ``special``: add what the model wants around an input; ``parse``:
        control tokens written as text become tokens."""
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        while True:
            tokens = (C.llama_token * room)()
            n = C.llama_tokenize(self.vocab, data, len(data), tokens, room, special, parse)
            if n >= 0:
                return list(tokens[:n])
            room = -n

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to an answer."""
        known = self._pieces.get(token)
        if known is None:
            known = self._render(token, special=True)
            if C.llama_vocab_is_control(self.vocab, token) and known not in self._markers:
                known = b""
            self._pieces[token] = known
        return known

    def detokenize(self, tokens: list[int]) -> str:
        """Text of a prompt that came as tokens; control tokens are written out."""
        return b"".join(self._render(t, special=True) for t in tokens).decode("utf-8", "replace")

    def is_end(self, token: int) -> bool:
        """True for a token that ends a generation."""
        return bool(C.llama_vocab_is_eog(self.vocab, token))

    def close(self) -> None:
        """Free the weights; every context on them must be closed before."""
        C.llama_model_free(self.handle)

    def _render(self, token: int, *, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = int(C.llama_token_to_piece(self.vocab, token, buffer, size, 0, special))
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def _text_of(self, token: int) -> str:
        if token < 0:
            return ""
        return self._render(token, special=True).decode("utf-8", "replace")

    def _template(self) -> str | None:
        raw: Any = C.llama_model_chat_template(self.handle, None)
        return raw.decode("utf-8", "replace") if raw else None


def on_gpu(gpu_layers: int) -> bool:
    """Whether a model with that many layers on a GPU has any there."""
    return bool(C.llama_supports_gpu_offload()) and gpu_layers != 0


_callback: Any = None
"""What llama.cpp calls for every line, as long as the process lives: it may log at any time, and
keeps no reference of its own."""


def silence(level: int) -> None:
    """Send llama.cpp's log lines of ``level`` and worse (3 = warning, 4 = error) to standard error
    and drop the others, from now on."""
    global _callback
    ggml_continue = 5
    last = [0]

    @C.llama_log_callback  # type: ignore[untyped-decorator]
    def log(severity: int, text: bytes, _: object) -> None:
        if severity != ggml_continue:
            last[0] = severity
        if last[0] >= level:
            sys.stderr.write(text.decode("utf-8", "replace"))
            sys.stderr.flush()

    C.llama_log_set(log, ctypes.c_void_p(0))
    _callback = log  # and only now may the one before it go
