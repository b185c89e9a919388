"""How one sequence's next token is chosen from its logits, and how likely it was."""

from __future__ import annotations

import ctypes
import secrets
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from tidemill.backends.llama.grammar import CANDIDATE, Grammar, apply
from tidemill.backends.llama.model import Model
from tidemill.types import Sampling, TokenLogprob

Logits = NDArray[np.float32]

# A greedy choice under a grammar is the best allowed of these, if any is: they are the likeliest.
_FIRST_LOOK = 64


class Chooser:
    """The sampler chain and the grammar of one sequence."""

    def __init__(
        self,
        model: Model,
        sampling: Sampling,
        *,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> None:
        """``logprobs`` as in ``Generation``. Takes ownership of the grammar."""
        self.logprobs = logprobs
        self.native: Any = None
        """The same for the native step, once it was asked for."""
        self._model, self._grammar = model, grammar
        self._chain = _chain(model, sampling)
        self.greedy = self._chain is None and grammar is None
        """True when the choice is the plain argmax."""

    @property
    def addresses(self) -> tuple[int, int]:
        """Where the chain and the grammar lie in memory; 0 for none."""
        grammar = None if self._grammar is None else self._grammar.sampler
        return _address(self._chain), _address(grammar)

    def choose(self, logits: Logits) -> int | None:
        """The next token, accepted; None when the grammar allows none."""
        token: int | None = self._pick(logits)
        if self._grammar is not None:
            # Most tokens fit. Looking at one costs a hundredth of looking at all.
            assert token is not None
            if not self._grammar.allows(token):
                token = self._pick_allowed(logits, self._grammar)
                if token is None:
                    return None
            self._grammar.accept(token)
        if self._chain is not None:
            C.llama_sampler_accept(self._chain, token)
        return token

    def close(self) -> None:
        """Free what llama.cpp holds for it."""
        if self._chain is not None:
            C.llama_sampler_free(self._chain)
            self._chain = None
        if self._grammar is not None:
            self._grammar.close()
            self._grammar = None

    def _pick(self, logits: Logits) -> int:
        if self._chain is None:
            return int(logits.argmax())
        candidates = _candidates(logits)
        return int(candidates["id"][apply(self._chain, candidates)])

    def _pick_allowed(self, logits: Logits, grammar: Grammar) -> int | None:
        if self._chain is None and len(logits) > _FIRST_LOOK:
            likely = np.argpartition(logits, -_FIRST_LOOK)[-_FIRST_LOOK:]
            token = _best(_allowed(logits, grammar, likely))
            if token is not None:
                return token
        allowed = _allowed(logits, grammar)
        if self._chain is None or not len(allowed):
            return _best(allowed)
        return int(allowed["id"][apply(self._chain, allowed)])


def _address(sampler: Any) -> int:
    return 0 if sampler is None else ctypes.cast(sampler, ctypes.c_void_p).value or 0


def _candidates(logits: Logits, ids: NDArray[np.integer] | None = None) -> NDArray[np.void]:
    if ids is not None:
        logits = logits[ids]
    out = np.empty(len(logits), dtype=CANDIDATE)
    out["id"] = np.arange(len(logits), dtype=np.int32) if ids is None else ids
    out["logit"], out["p"] = logits, 0.0
    return out


def _allowed(
    logits: Logits, grammar: Grammar, ids: NDArray[np.integer] | None = None
) -> NDArray[np.void]:
    candidates = _candidates(logits, ids)
    grammar.allow(candidates)
    allowed: NDArray[np.void] = candidates[np.isfinite(candidates["logit"])]
    return allowed


def _best(candidates: NDArray[np.void]) -> int | None:
    return int(candidates["id"][candidates["logit"].argmax()]) if len(candidates) else None


def _chain(model: Model, s: Sampling) -> Any:
    """A chain in the order bias, penalties, top-k, top-p, min-p, temperature, draw; None when the
    choice is greedy and nothing moves the logits."""
    parts = []
    if s.logit_bias:
        bias = (C.llama_logit_bias * len(s.logit_bias))(
            *(C.llama_logit_bias(token=t, bias=b) for t, b in s.logit_bias.items())
        )
        parts.append(C.llama_sampler_init_logit_bias(model.n_vocab, len(bias), bias))
    if s.frequency_penalty or s.presence_penalty or s.repeat_penalty != 1.0:
        # Over the whole answer, as the API defines them.
        parts.append(
            C.llama_sampler_init_penalties(
                model.n_vocab,
                model.n_ctx_train,
                s.repeat_penalty,
                s.frequency_penalty,
                s.presence_penalty,
            )
        )
    if s.temperature <= 0:
        if not parts:
            return None
        parts.append(C.llama_sampler_init_greedy())
    else:
        if s.top_k > 0:
            parts.append(C.llama_sampler_init_top_k(s.top_k))
        if s.top_p < 1.0:
            parts.append(C.llama_sampler_init_top_p(s.top_p, 1))
        if s.min_p > 0:
            parts.append(C.llama_sampler_init_min_p(s.min_p, 1))
        parts.append(C.llama_sampler_init_temp(s.temperature))
        parts.append(C.llama_sampler_init_dist(_seed(s.seed)))
    chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
    for part in parts:
        C.llama_sampler_chain_add(chain, part)
    return chain


def _seed(seed: int | None) -> int:
    # 2**32 - 1 means "random" to llama.cpp, so that no given seed may become it.
    return secrets.randbelow(2**32 - 1) if seed is None else seed % (2**32 - 1)


def token_logprob(model: Model, logits: Logits, token: int, top: int) -> TokenLogprob:
    """Natural-log probabilities of the chosen token and of the ``top`` likeliest, from the model's
    own logits, before temperature, penalties or grammar."""
    peak = logits.max()
    total = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    likeliest: list[int] = []
    if top:
        some = np.argpartition(logits, -top)[-top:]
        # Ties go by token, so that equal logits give equal answers.
        likeliest = [int(t) for t in some[np.lexsort((some, -logits[some]))]]
    return named_logprob(
        model,
        token,
        float(logits[token]) - total,
        [(t, float(logits[t]) - total) for t in likeliest],
    )


def named_logprob(
    model: Model, token: int, logprob: float, top: list[tuple[int, float]]
) -> TokenLogprob:
    """Log probabilities of tokens, with their texts."""

    def entry(t: int, value: float) -> tuple[str, float, tuple[int, ...]]:
        piece = model.piece(t)
        return piece.decode("utf-8", "replace"), value, tuple(piece)

    text, logprob, data = entry(token, logprob)
    return TokenLogprob(
        token=text, logprob=logprob, bytes=data, top=tuple(entry(t, value) for t, value in top)
    )
