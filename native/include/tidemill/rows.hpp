#pragma once

// Rows of queries that go over keys and values, a block at a time. For a size D of heads that kLanes divides.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tidemill/lanes.hpp"

#ifndef TIDEMILL_NO_LANES
namespace tidemill {

constexpr std::size_t kBlock = 64;      ///< keys at once
constexpr std::size_t kDirect = 4;      ///< up to this many rows, preparing a block costs more than it saves
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr Half kNeverHalf = 0xFC00;

/// R rows of scores: s[r][key] = q[r] . kt[.][key], for T vectors of keys side by side.
template <std::size_t D, std::size_t R, std::size_t T>
void score(const float* q, const float* kt, float* s) {
  Lanes all[R][T] = {};
  for (std::size_t d = 0; d < D; ++d) {
    Lanes k[T];
    for (std::size_t t = 0; t < T; ++t) k[t] = load(kt + d * kBlock + t * kLanes);
    for (std::size_t r = 0; r < R; ++r) {
      for (std::size_t t = 0; t < T; ++t) all[r][t] += q[r * D + d] * k[t];
    }
  }
  for (std::size_t r = 0; r < R; ++r) {
    for (std::size_t t = 0; t < T; ++t) store(s + r * kBlock + t * kLanes, all[r][t]);
  }
}

/// R rows of output grow by p[r][key] * v[key], for T vectors of numbers side by side.
template <std::size_t D, std::size_t R, std::size_t T, typename Number>
void weigh(const float* p, const Number* v, std::size_t step, std::size_t keys, float* out) {
  Lanes all[R][T];
  for (std::size_t r = 0; r < R; ++r) {
    for (std::size_t t = 0; t < T; ++t) all[r][t] = load(out + r * D + t * kLanes);
  }
  for (std::size_t key = 0; key < keys; ++key) {
    Lanes value[T];
    for (std::size_t t = 0; t < T; ++t) value[t] = load(v + key * step + t * kLanes);
    for (std::size_t r = 0; r < R; ++r) {
      for (std::size_t t = 0; t < T; ++t) all[r][t] += p[r * kBlock + key] * value[t];
    }
  }
  for (std::size_t r = 0; r < R; ++r) {
    for (std::size_t t = 0; t < T; ++t) store(out + r * D + t * kLanes, all[r][t]);
  }
}

template <std::size_t D, std::size_t R, typename Number>
void weigh_all(const float* p, const Number* v, std::size_t step, std::size_t keys, float* out) {
  constexpr std::size_t kVectors = D / kLanes;
  for (std::size_t t = 0; t + kWide <= kVectors; t += kWide) {
    weigh<D, R, kWide>(p, v + t * kLanes, step, keys, out + t * kLanes);
  }
  if constexpr (constexpr std::size_t kRest = kVectors % kWide; kRest > 0) {
    constexpr std::size_t kFrom = (kVectors - kRest) * kLanes;
    weigh<D, R, kRest>(p, v + kFrom, step, keys, out + kFrom);
  }
}

/// The scores of a few rows, straight from keys in half precision; `keys` of them, the rest of the last vector is any.
template <std::size_t D>
void score_direct(const float* q, std::size_t rows, const Half* k, std::size_t step, std::size_t keys, float* s) {
  for (std::size_t from = 0; from < keys; from += kLanes) {
    const Half* here[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) here[i] = k + std::min(from + i, keys - 1) * step;
    if (rows == 1) {
      Lanes parts[kLanes] = {};
      for (std::size_t d = 0; d < D; d += kLanes) {
        const Lanes some = load(q + d);
        for (std::size_t i = 0; i < kLanes; ++i) parts[i] += some * load(here[i] + d);
      }
      store(s + from, sums(parts));
      continue;
    }
    alignas(64) float wide[kLanes][D];
    for (std::size_t i = 0; i < kLanes; ++i) {
      for (std::size_t d = 0; d < D; d += kLanes) store(wide[i] + d, load(here[i] + d));
    }
    for (std::size_t r = 0; r < rows; ++r) {
      Lanes parts[kLanes] = {};
      for (std::size_t d = 0; d < D; d += kLanes) {
        const Lanes some = load(q + r * D + d);
        for (std::size_t i = 0; i < kLanes; ++i) parts[i] += some * load(wide[i] + d);
      }
      store(s + r * kBlock + from, sums(parts));
    }
  }
}

/// Ask for rows of memory that are far apart before they are needed: with one query, waiting is all that costs.
template <std::size_t D>
void fetch(const Half* from, std::size_t step, std::size_t rows) {
  constexpr std::size_t kLine = 64 / sizeof(Half);
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t d = 0; d < D; d += kLine) __builtin_prefetch(from + row * step + d);
  }
}

/// What is left to do when a row has seen all of its keys.
template <std::size_t D>
void finish(const float* out, float total, float* to) {
  const Lanes share = every(total == 0.0F ? 0.0F : 1.0F / total);
  for (std::size_t d = 0; d < D; d += kLanes) store(to + d, load(out + d) * share);
}

template <std::size_t D>
constexpr std::size_t kPartial = D + 2;

/// One row from what `count` others know that saw parts of its keys, `step` numbers apart; spoils the first.
template <std::size_t D>
void join(float* parts, std::size_t step, std::size_t count, float* to) {
  float most = kNever;
  for (std::size_t i = 0; i < count; ++i) most = std::max(most, parts[i * step + D]);
  float total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const float* one = parts + i * step;
    const float less = one[D] == kNever ? 0.0F : std::exp(one[D] - most);
    total += one[D + 1] * less;
    for (std::size_t d = 0; d < D; d += kLanes) {
      store(parts + d, (i == 0 ? Lanes{} : load(parts + d)) + load(one + d) * less);
    }
  }
  finish<D>(parts, total, to);
}

/// Rows of queries that go over blocks of keys, with what is known of each so far.
template <std::size_t D>
class Rows {
 public:
  void begin(std::size_t rows) {
    q_.resize(rows * D);
    out_.assign(rows * D, 0.0F);
    most_.assign(rows, kNever);
    total_.assign(rows, 0.0F);
    k_.resize(D * kBlock);
    v_.resize(kBlock * D);
    scores_.resize(kRows * kBlock);
  }
  float* query(std::size_t row) { return q_.data() + row * D; }

  /// Rows `first ..` see `keys` more, at k and v. `mask(row)` is what is added, or null.
  template <typename Mask>
  void see(std::size_t first, std::size_t rows, const Half* k, std::size_t k_step, const Half* v, std::size_t v_step,
           std::size_t keys, Mask mask) {
    for (std::size_t from = 0; from < keys; from += kBlock) {
      const std::size_t n = std::min(kBlock, keys - from);
      const Half* k_here = k + from * k_step;
      const Half* v_here = v + from * v_step;
      const auto mask_here = [&](std::size_t row) -> const Half* {
        const Half* all = mask(row);
        return all == nullptr ? nullptr : all + from;
      };
      if (rows <= kDirect) {
        fetch<D>(v_here, v_step, n);
        score_direct<D>(query(first), rows, k_here, k_step, n, scores_.data());
        soften(first, rows, n, mask_here);
        if (from + kBlock < keys) fetch<D>(k_here + kBlock * k_step, k_step, std::min(kBlock, keys - from - kBlock));
        add(first, rows, v_here, v_step, n);
      } else {
        widen(k_here, k_step, v_here, v_step, n);
        for (std::size_t row = first; row < first + rows; row += kRows) {
          const std::size_t some = std::min(kRows, first + rows - row);
          score_some(row, some);
          soften(row, some, n, mask_here);
          add(row, some, v_.data(), D, n);
        }
      }
    }
  }

  void write(std::size_t row, float* to) const { finish<D>(out_.data() + row * D, total_[row], to); }

  /// What is known of a row so far, for `join`: kPartial<D> numbers.
  void save(std::size_t row, float* to) const {
    std::copy_n(out_.data() + row * D, D, to);
    to[D] = most_[row];
    to[D + 1] = total_[row];
  }

 private:
  /// Keys as [number][key] and values as [key][number], in single precision.
  void widen(const Half* k, std::size_t k_step, const Half* v, std::size_t v_step, std::size_t n) {
    for (std::size_t key = 0; key < kBlock; key += kLanes) {
      for (std::size_t d = 0; d < D; d += kLanes) {
        Lanes some[kLanes];
        for (std::size_t i = 0; i < kLanes; ++i) some[i] = key + i < n ? load(k + (key + i) * k_step + d) : Lanes{};
        transpose(some);
        for (std::size_t i = 0; i < kLanes; ++i) store(k_.data() + (d + i) * kBlock + key, some[i]);
      }
    }
    for (std::size_t key = 0; key < n; ++key) {
      for (std::size_t d = 0; d < D; d += kLanes) store(v_.data() + key * D + d, load(v + key * v_step + d));
    }
  }

  template <std::size_t R = kRows>
  void score_some(std::size_t row, std::size_t rows) {
    if (rows == R) {
      for (std::size_t key = 0; key < kBlock; key += kWide * kLanes) {
        score<D, R, kWide>(query(row), k_.data() + key, scores_.data() + key);
      }
    } else if constexpr (R > 1) {
      score_some<R - 1>(row, rows);
    }
  }

  /// Scores become weights e^(score - most); what was added before is scaled when a larger score came.
  template <typename Mask>
  void soften(std::size_t first, std::size_t rows, std::size_t n, Mask mask) {
    for (std::size_t r = 0; r < rows; ++r) {
      float* s = scores_.data() + r * kBlock;
      const std::size_t padded = (n + kLanes - 1) / kLanes * kLanes;
      const std::size_t row = first + r;
      if (const Half* added = mask(row)) {
        alignas(64) Half last[kLanes];
        for (std::size_t key = 0; key < padded; key += kLanes) {
          const Half* from = added + key;
          if (key + kLanes > n) {
            std::fill_n(last, kLanes, kNeverHalf);
            std::copy_n(from, n - key, last);
            from = last;
          }
          store(s + key, load(s + key) + load(from));
        }
      } else {
        std::fill(s + n, s + padded, kNever);
      }
      Lanes best = load(s);
      for (std::size_t key = kLanes; key < padded; key += kLanes) best = larger(best, load(s + key));
      const float most = std::max(most_[row], largest(best));
      if (most == kNever) {  // it sees none of these keys
        std::fill_n(s, padded, 0.0F);
        continue;
      }
      Lanes total = {};
      for (std::size_t key = 0; key < padded; key += kLanes) {
        const Lanes weight = exponential(load(s + key) - most);
        store(s + key, weight);
        total += weight;
      }
      if (most > most_[row]) {
        const float less = std::exp(most_[row] - most);
        total_[row] *= less;
        float* out = out_.data() + row * D;
        for (std::size_t d = 0; d < D; d += kLanes) store(out + d, load(out + d) * less);
        most_[row] = most;
      }
      total_[row] += sum(total);
    }
  }

  template <std::size_t R = kRows, typename Number>
  void add(std::size_t row, std::size_t rows, const Number* v, std::size_t step, std::size_t n) {
    if (rows == R) {
      weigh_all<D, R>(scores_.data(), v, step, n, out_.data() + row * D);
    } else if constexpr (R > 1) {
      add<R - 1>(row, rows, v, step, n);
    }
  }

  std::vector<float> q_, out_, most_, total_, k_, v_, scores_;
};

}  // namespace tidemill
#endif
