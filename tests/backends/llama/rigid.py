"""An engine process whose model says that its attention has a sliding window.

Started in place of ``tidemill.backends.llama.child``.
"""

from __future__ import annotations

from llama_cpp import llama_cpp as C

from tidemill.backends.llama import child

if __name__ == "__main__":
    C.llama_model_n_swa = lambda handle: 4096
    child.main()
