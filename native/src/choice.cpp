#include "tidemill/choice.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <stdexcept>

namespace tidemill {
namespace {

// A greedy choice under a grammar is the best allowed of these, if any is: they are the likeliest.
constexpr std::size_t kFirstLook = 64;

using Candidates = std::vector<llama_token_data>;

Candidates all_of(const float* logits, std::size_t n) {
  Candidates all(n);
  for (std::size_t t = 0; t < n; ++t) all[t] = {static_cast<llama_token>(t), logits[t], 0.0F};
  return all;
}

/// Likelier first; of equals, the lower token.
struct Likelier {
  const float* logits;
  bool operator()(llama_token a, llama_token b) const {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  }
};

std::vector<llama_token> likeliest(const float* logits, std::size_t n, std::size_t k) {
  std::vector<llama_token> tokens(n);
  std::iota(tokens.begin(), tokens.end(), 0);
  k = std::min(k, n);
  std::partial_sort(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(k), tokens.end(), Likelier{logits});
  tokens.resize(k);
  return tokens;
}

llama_token_data_array array_of(Candidates& candidates) { return {candidates.data(), candidates.size(), -1, false}; }

void keep_allowed(llama_sampler* grammar, Candidates& candidates) {
  llama_token_data_array array = array_of(candidates);
  llama_sampler_apply(grammar, &array);
  std::erase_if(candidates, [](const llama_token_data& c) { return !std::isfinite(c.logit); });
}

bool allows(llama_sampler* grammar, llama_token token) {
  Candidates one{{token, 0.0F, 0.0F}};
  keep_allowed(grammar, one);
  return !one.empty();
}

llama_token best(const Candidates& candidates) {
  const auto it = std::max_element(candidates.begin(), candidates.end(),
                                   [](const auto& a, const auto& b) { return a.logit < b.logit; });
  return it == candidates.end() ? LLAMA_TOKEN_NULL : it->id;
}

llama_token sampled(llama_sampler* chain, Candidates& candidates) {
  llama_token_data_array array = array_of(candidates);
  llama_sampler_apply(chain, &array);
  if (array.selected < 0) throw std::runtime_error("the sampler chain chose no token");
  return array.data[array.selected].id;
}

llama_token pick(llama_sampler* chain, const float* logits, std::size_t n) {
  if (chain == nullptr) return static_cast<llama_token>(argmax(logits, n));
  Candidates all = all_of(logits, n);
  return sampled(chain, all);
}

llama_token pick_allowed(const Choice& choice, const float* logits, std::size_t n) {
  if (choice.chain == nullptr && n > kFirstLook) {
    Candidates few;
    for (const llama_token t : likeliest(logits, n, kFirstLook)) few.push_back({t, logits[t], 0.0F});
    keep_allowed(choice.grammar, few);
    if (!few.empty()) return best(few);
  }
  Candidates all = all_of(logits, n);
  keep_allowed(choice.grammar, all);
  if (choice.chain == nullptr || all.empty()) return best(all);
  return sampled(choice.chain, all);
}

}  // namespace

std::size_t argmax(const float* values, std::size_t n) {
  // Lanes, so that the compiler may keep them in one register; then the first place that holds the peak.
  constexpr std::size_t kLanes = 16;
  float peak = values[0];
  std::size_t at = 0;
  if (n >= kLanes) {
    std::array<float, kLanes> lanes{};
    std::copy_n(values, kLanes, lanes.begin());
    for (at = kLanes; at + kLanes <= n; at += kLanes) {
      for (std::size_t k = 0; k < kLanes; ++k) lanes[k] = values[at + k] > lanes[k] ? values[at + k] : lanes[k];
    }
    peak = *std::max_element(lanes.begin(), lanes.end());
  }
  for (; at < n; ++at) peak = std::max(peak, values[at]);
  return static_cast<std::size_t>(std::find(values, values + n, peak) - values);
}

Chosen choose(const Choice& choice, const float* logits, const llama_vocab* vocab) {
  const auto n = static_cast<std::size_t>(llama_vocab_n_tokens(vocab));
  Chosen chosen;
  chosen.token = pick(choice.chain, logits, n);
  if (choice.grammar != nullptr) {
    if (!allows(choice.grammar, chosen.token)) chosen.token = pick_allowed(choice, logits, n);
    if (chosen.token == LLAMA_TOKEN_NULL) {
      chosen.end = true;
      return chosen;
    }
    llama_sampler_accept(choice.grammar, chosen.token);
  }
  if (choice.chain != nullptr) llama_sampler_accept(choice.chain, chosen.token);
  chosen.end = llama_vocab_is_eog(vocab, chosen.token);
  if (choice.top && !chosen.end) {
    const float peak = logits[argmax(logits, n)];
    double sum = 0.0;
    for (std::size_t t = 0; t < n; ++t) sum += std::exp(logits[t] - peak);
    const double total = peak + std::log(sum);
    chosen.logprob = logits[chosen.token] - total;
    if (*choice.top > 0) {
      for (const llama_token t : likeliest(logits, n, *choice.top)) chosen.top.emplace_back(t, logits[t] - total);
    }
  }
  return chosen;
}

std::vector<Chosen> choose_on(const Choice& choice, const std::vector<llama_token>& drafts, const float* logits,
                              const llama_vocab* vocab) {
  const auto n = static_cast<std::size_t>(llama_vocab_n_tokens(vocab));
  std::vector<Chosen> chosen{choose(choice, logits, vocab)};
  for (const llama_token draft : drafts) {
    if (chosen.back().end || chosen.back().token != draft) break;
    chosen.push_back(choose(choice, logits + chosen.size() * n, vocab));
  }
  return chosen;
}

}  // namespace tidemill
