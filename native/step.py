"""The native step: batch assembly, ``llama_decode`` and the choice of all tokens in one call.

``Step.run`` takes chunks (seq, start, tokens, drafts, choice), sorted by seq. It answers the return
code of ``llama_decode`` and, when that is 0, for each choice in order all that was chosen: a token
after the chunk's own and, while that is the next draft and not the end, one more. Each is (token,
end, logprob, top); the token is -1 when the grammar allows none. It holds no GIL while it computes,
so that other Python threads cost it nothing. It is there where llama-cpp-python was installed when
this package was built; ``load`` says why it is not.

``offer_attention()`` makes llama.cpp compute attention with this package's own code, in contexts
that are made later in this process; it answers why that cannot be, or nothing.
``share(beginnings)`` says what the sequences of the context that computes next have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType


def load(*, version: str, sizes: Mapping[str, int]) -> ModuleType:
    """The extension: ``Step``, ``Choice``, ``offer_attention`` and ``share``.

    Call it after importing ``llama_cpp``, so that one libllama is loaded, and pass that package's
    ``__version__`` and its structs' sizes by name (at least ``llama_context_params``). llama.cpp
    promises no stable interface: any difference raises ``ImportError`` with one sentence.
    """
    try:
        from tidemill.native import _step
    except ImportError as exc:
        raise ImportError(f"The native step was not built, or does not load: {exc}.") from exc
    if _step.version() != version:
        raise ImportError(
            f"The native step was built against llama-cpp-python {_step.version()},"
            f" {version} is installed: reinstall tidemill."
        )
    ours = _step.sizes()
    for name in ("llama_context_params", *sizes):
        if ours.get(name) != sizes.get(name):
            raise ImportError(
                f"{name} has {ours.get(name)} bytes in the native step"
                f" and {sizes.get(name)} in llama-cpp-python: reinstall tidemill."
            )
    return _step
