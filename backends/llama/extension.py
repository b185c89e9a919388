"""The C++ extension, where it fits the llama.cpp that is installed."""

from __future__ import annotations

import ctypes
from types import ModuleType

import llama_cpp
from llama_cpp import llama_cpp as C

from tidemill.native import step as native

_STRUCTS = ("llama_context_params", "llama_model_params", "llama_batch")


def extension() -> ModuleType:
    """What ``tidemill.native.step`` describes; raises ``ImportError`` with one sentence."""
    sizes = {name: ctypes.sizeof(getattr(C, name)) for name in _STRUCTS}
    return native.load(version=llama_cpp.__version__, sizes=sizes)
