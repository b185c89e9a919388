"""How far two files of one model are apart, as llama.cpp computes them on a text that comes with
Tidemill."""

from __future__ import annotations

import math

import numpy as np
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from tidemill.backends.llama.attention import flash
from tidemill.backends.llama.model import Model
from tidemill.errors import EngineUnavailable

TEXT = (
    "The mill stands where the river meets the sea. Twice a day the tide fills the pond behind the "
    "wall, and when the water outside has fallen, the gate is opened and the wheel begins to turn: "
    "1 turn, 2 turns, 3 turns. Nobody has to wait for the wind. The miller knows from a table when "
    "the next flood comes, and he sleeps in between. What is not ground today is ground tomorrow, "
    "since the moon forgets no one, and the farmers who bring their corn in the evening find the "
    "flour in sacks at the door, each with a name on it. It costs less than at the mill in the "
    "town, where everybody wants to be served at once."
)
"""Some hundred tokens: a sign of trouble, and no more than a hint of quality."""


class Reading:
    """What a model makes of ``TEXT``."""

    def __init__(self, model: Model, threads: int) -> None:
        """Raises ``EngineUnavailable`` when llama.cpp cannot compute with the model."""
        self._tokens = model.tokenize(TEXT, special=True, parse=False)
        self._expected = _log_probabilities(model, self._tokens, threads)

    @property
    def perplexity(self) -> float:
        """Of every token but the first."""
        rows = np.arange(len(self._tokens) - 1)
        chosen = self._expected[rows, self._tokens[1:]]
        return math.exp(-float(chosen.mean(dtype=np.float64)))

    def divergence(self, other: Reading) -> float:
        """Mean Kullback-Leibler divergence of what another file expects, in nats."""
        mine, theirs = self._expected, other._expected
        return float((np.exp(mine) * (mine - theirs)).sum(axis=1).mean(dtype=np.float64))


def _log_probabilities(model: Model, tokens: list[int], threads: int) -> NDArray[np.float32]:
    """Of every next token after each of ``tokens``: ``(tokens, n_vocab)``."""
    params = C.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = len(tokens)
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = flash()
    ctx = C.llama_init_from_model(model.handle, params)
    if not ctx:
        raise EngineUnavailable("llama.cpp cannot make a context of this model.")
    batch = C.llama_batch_init(len(tokens), 0, 1)
    try:
        model.adapt(ctx)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.n_tokens = len(tokens)
        if C.llama_decode(ctx, batch):
            raise EngineUnavailable("llama.cpp cannot compute with this model.")
        computed = C.llama_get_logits(ctx)
        if not computed:
            raise EngineUnavailable("This model does not generate text.")
        shape = (len(tokens), model.n_vocab)
        logits = np.ctypeslib.as_array(computed, shape=shape).copy()
    finally:
        C.llama_batch_free(batch)
        C.llama_free(ctx)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits
