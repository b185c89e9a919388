#pragma once

#include <llama.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace tidemill {

/// How the next token of one sequence is chosen. Chain and grammar belong to whoever made them, and outlive this.
struct Choice {
  llama_sampler* chain = nullptr;    ///< null: the likeliest token
  llama_sampler* grammar = nullptr;  ///< null: any token
  std::optional<std::size_t> top;    ///< log-probabilities: of the chosen token, and of this many likeliest
};

using Likely = std::pair<llama_token, double>;

/// A chosen token. `token` is LLAMA_TOKEN_NULL when the grammar allows none.
struct Chosen {
  llama_token token = LLAMA_TOKEN_NULL;
  bool end = false;
  std::optional<double> logprob;
  std::vector<Likely> top;
};

/// The index of the first largest of `n` > 0 numbers.
std::size_t argmax(const float* values, std::size_t n);

/// Choose and accept a token. The grammar is asked about one token first, since most tokens fit; only a refusal
/// makes it look at many. Log-probabilities are the model's own: before chain and grammar.
Chosen choose(const Choice& choice, const float* logits, const llama_vocab* vocab);

/// Choose a token from the first row of `logits` and, while it is the next of `drafts` and not the end, another one
/// from the next row. There are `drafts.size() + 1` rows.
std::vector<Chosen> choose_on(const Choice& choice, const std::vector<llama_token>& drafts, const float* logits,
                              const llama_vocab* vocab);

}  // namespace tidemill
