"""How far two files of one model are apart, as llama.cpp computes them."""

from __future__ import annotations

import numpy as np
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from tidemill.backends.llama.model import Model
from tidemill.errors import EngineUnavailable

TEXT = (
    "The mill stands where the river meets the sea. Twice a day the tide fills the pond behind the "
    "wall, and when the water outside has fallen, the gate is opened and the wheel begins to turn: "
    "1 turn, 2 turns, 3 turns. Nobody has to wait for the wind."
)


def log_probabilities(model: Model, threads: int) -> NDArray[np.float64]:
    """Of every next token after each token of ``TEXT``: ``(tokens, n_vocab)``."""
    tokens = model.tokenize(TEXT, special=True, parse=False)
    params = C.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = len(tokens)
    params.n_threads = params.n_threads_batch = threads
    ctx = C.llama_init_from_model(model.handle, params)
    if not ctx:
        raise EngineUnavailable("llama.cpp cannot make a context of this model.")
    try:
        model.adapt(ctx)
        batch = C.llama_batch_init(len(tokens), 0, 1)
        try:
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.n_tokens = len(tokens)
            if C.llama_decode(ctx, batch):
                raise EngineUnavailable("llama.cpp cannot compute with this model.")
            shape = (len(tokens), model.n_vocab)
            logits = np.ctypeslib.as_array(C.llama_get_logits(ctx), shape=shape)
            exact = logits.astype(np.float64)
        finally:
            C.llama_batch_free(batch)
    finally:
        C.llama_free(ctx)
    exact -= exact.max(axis=1, keepdims=True)
    normalised: NDArray[np.float64] = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    return normalised


def divergence(of: NDArray[np.float64], by: NDArray[np.float64]) -> float:
    """Mean Kullback-Leibler divergence in nats, of log probabilities as above."""
    return float((np.exp(of) * (of - by)).sum(axis=1).mean())
