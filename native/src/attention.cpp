// Attention on a CPU, for many streams that each ask little. Compiled for the processor at hand.

#include "tidemill/attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tidemill/lanes.hpp"

namespace tidemill {

#ifdef TIDEMILL_NO_LANES

void attend(const Attention&, int) {}
bool attends(std::size_t) { return false; }
const char* attention_needs() { return nullptr; }

#else

namespace {

constexpr std::size_t kBlock = 64;      ///< keys at once
constexpr std::size_t kTaskRows = 96;   ///< rows of queries that share what is read of keys and values
constexpr std::size_t kDirect = 4;      ///< up to this many rows, preparing a block costs more than it saves
constexpr std::size_t kLeast = 32;      ///< keys in common that are worth a pass of their own
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr Half kNeverHalf = 0xFC00;

const Half* halves(const char* base, std::size_t bytes) { return reinterpret_cast<const Half*>(base + bytes); }

/// Some queries of one stream.
struct Segment {
  std::size_t stream, first, count;
  std::size_t from, to;  ///< the keys that any of them sees are in between
};

/// What one thread computes at once: queries that have their first `shared` keys in common, for each head of keys.
struct Task {
  std::vector<Segment> segments;
  std::size_t shared = 0;
  std::size_t queries = 0;
};

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

/// The scores of a few rows, straight from keys in half precision; `keys` of them, the rest of the last vector is 0.
template <std::size_t D>
void score_direct(const float* q, std::size_t rows, const Half* k, std::size_t step, std::size_t keys, float* s) {
  alignas(64) float wide[kLanes][D];
  for (std::size_t from = 0; from < keys; from += kLanes) {
    const std::size_t n = std::min(kLanes, keys - from);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t d = 0; d < D; d += kLanes) store(wide[i] + d, load(k + (from + i) * step + d));
    }
    for (std::size_t i = n; i < kLanes; ++i) std::fill_n(wide[i], D, 0.0F);
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
        score_direct<D>(query(first), rows, k_here, k_step, n, scores_.data());
        soften(first, rows, n, mask_here);
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

  void write(std::size_t row, float* to) const {
    const float total = total_[row];
    const Lanes share = every(total == 0.0F ? 0.0F : 1.0F / total);
    for (std::size_t d = 0; d < D; d += kLanes) store(to + d, load(out_.data() + row * D + d) * share);
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

class Plan {
 public:
  Plan(const Attention& a, int threads) : a_(a) {
    const std::size_t group = a.heads / a.kv_heads;
    const std::size_t per_head = (2 * static_cast<std::size_t>(threads) + a.kv_heads - 1) / a.kv_heads;
    const std::size_t all = a.streams * a.queries;
    most_ = std::max<std::size_t>(1, std::min(kTaskRows / group, (all + per_head - 1) / per_head));
    std::vector<bool> placed(a.streams, false);
    if (a.beginnings != nullptr) {
      for (std::size_t stream = 0; stream < a.streams; ++stream) {
        if (!placed[stream]) together(stream, placed);
      }
    }
    for (std::size_t stream = 0; stream < a.streams; ++stream) {
      if (!placed[stream]) {
        add({stream}, 0);
      }
    }
  }

  std::vector<Task> tasks;

 private:
  /// The streams of this one's group that gain most by being computed together, if any do.
  void together(std::size_t stream, std::vector<bool>& placed) {
    const std::int32_t group = a_.beginnings[stream].group;
    if (group < 0) return;
    std::vector<std::size_t> members;
    for (std::size_t i = stream; i < a_.streams; ++i) {
      const Beginning& one = a_.beginnings[i];
      if (!placed[i] && one.group == group && sees(i, static_cast<std::size_t>(one.length))) members.push_back(i);
    }
    const auto length = [&](std::size_t i) { return static_cast<std::size_t>(a_.beginnings[i].length); };
    std::stable_sort(members.begin(), members.end(), [&](auto i, auto j) { return length(i) > length(j); });
    std::size_t count = 0;
    for (std::size_t n = 2; n <= members.size(); ++n) {
      if (length(members[n - 1]) < kLeast) break;
      if (count == 0 || length(members[n - 1]) * (n - 1) > length(members[count - 1]) * (count - 1)) count = n;
    }
    if (count == 0) return;
    members.resize(count);
    const std::size_t shared = length(members.back());
    std::sort(members.begin(), members.end());
    for (const std::size_t i : members) placed[i] = true;
    add(members, shared);
  }

  void add(const std::vector<std::size_t>& streams, std::size_t shared) {
    Task task;
    const auto flush = [&] {
      if (task.queries > 0) tasks.push_back(task);
      task = Task{};
      task.shared = shared;
    };
    flush();
    for (const std::size_t stream : streams) {
      for (std::size_t first = 0; first < a_.queries;) {
        const std::size_t count = std::min(a_.queries - first, most_ - task.queries);
        Segment segment{stream, first, count, a_.keys, 0};
        for (std::size_t i = first; i < first + count; ++i) widen(segment, i);
        segment.from = std::max(segment.from, shared);
        task.segments.push_back(segment);
        task.queries += count;
        first += count;
        if (task.queries == most_) flush();
      }
    }
    flush();
  }

  const Half* mask(std::size_t stream, std::size_t query) const {
    return halves(a_.mask, stream * a_.mask_stream + query * a_.mask_query);
  }

  /// Take in the keys that a query sees.
  void widen(Segment& segment, std::size_t query) const {
    std::size_t from = 0;
    std::size_t to = a_.keys;
    if (a_.mask != nullptr) {
      const Half* m = mask(segment.stream, query);
      while (to > 0 && m[to - 1] == kNeverHalf) --to;
      while (from < to && m[from] == kNeverHalf) ++from;
    }
    if (from < to) segment.from = std::min(segment.from, from);
    segment.to = std::max(segment.to, to);
  }

  /// Whether all queries of a stream see its first `length` keys as they are.
  bool sees(std::size_t stream, std::size_t length) const {
    if (length > a_.keys) return false;
    if (a_.mask == nullptr) return true;
    for (std::size_t query = 0; query < a_.queries; ++query) {
      const Half* m = mask(stream, query);
      Half any = 0;
      for (std::size_t key = 0; key < length; ++key) any |= m[key];
      if (any != 0) return false;
    }
    return true;
  }

  const Attention& a_;
  std::size_t most_;  ///< queries of a task
};

template <std::size_t D>
void compute(const Attention& a, const Task& task, std::size_t head) {
  thread_local Rows<D> rows;
  const std::size_t group = a.heads / a.kv_heads;
  rows.begin(task.queries * group);
  std::size_t row = 0;
  for (const Segment& segment : task.segments) {
    for (std::size_t i = segment.first; i < segment.first + segment.count; ++i) {
      for (std::size_t g = 0; g < group; ++g, ++row) {
        const auto* from = reinterpret_cast<const float*>(a.q + segment.stream * a.q_stream +
                                                          (head * group + g) * a.q_head + i * a.q_query);
        float* to = rows.query(row);
        for (std::size_t d = 0; d < D; d += kLanes) store(to + d, load(from + d) * a.scale);
      }
    }
  }
  const auto keys = [&](std::size_t stream, std::size_t from) {
    return halves(a.k, stream * a.k_stream + head * a.k_head + from * a.k_key);
  };
  const auto values = [&](std::size_t stream, std::size_t from) {
    return halves(a.v, stream * a.v_stream + head * a.v_head + from * a.v_key);
  };
  const std::size_t k_step = a.k_key / sizeof(Half);
  const std::size_t v_step = a.v_key / sizeof(Half);
  if (task.shared > 0) {
    const std::size_t stream = task.segments.front().stream;
    rows.see(0, row, keys(stream, 0), k_step, values(stream, 0), v_step, task.shared,
             [](std::size_t) -> const Half* { return nullptr; });
  }
  row = 0;
  for (const Segment& segment : task.segments) {
    const std::size_t count = segment.count * group;
    if (segment.from < segment.to) {
      rows.see(row, count, keys(segment.stream, segment.from), k_step, values(segment.stream, segment.from), v_step,
               segment.to - segment.from, [&](std::size_t at) -> const Half* {
                 if (a.mask == nullptr) return nullptr;
                 const std::size_t query = segment.first + (at - row) / group;
                 return halves(a.mask, segment.stream * a.mask_stream + query * a.mask_query) + segment.from;
               });
    }
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t query = segment.first + i / group;
      rows.write(row + i,
                 a.out + ((segment.stream * a.queries + query) * a.heads + head * group + i % group) * D);
    }
    row += count;
  }
}

template <std::size_t D>
void run(const Attention& a, int threads) {
  const Plan plan(a, threads);
  const auto all = static_cast<std::int64_t>(plan.tasks.size() * a.kv_heads);
#ifdef _OPENMP  // the same threads as ggml's, which are awake between its operations
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
#endif
  for (std::int64_t i = 0; i < all; ++i) {
    const auto k = static_cast<std::size_t>(i);
    compute<D>(a, plan.tasks[k / a.kv_heads], k % a.kv_heads);
  }
}

template <std::size_t... D>
bool dispatch(const Attention& a, int threads, std::index_sequence<D...>) {
  return ((a.size == D ? (run<D>(a, threads), true) : false) || ...);
}

using Sizes = std::index_sequence<64, 80, 96, 128, 256>;

template <std::size_t... D>
bool is_one_of(std::size_t size, std::index_sequence<D...>) {
  return ((size == D) || ...);
}

}  // namespace

void attend(const Attention& attention, int threads) { dispatch(attention, threads, Sizes{}); }

bool attends(std::size_t size) { return is_one_of(size, Sizes{}); }

const char* attention_needs() {
#if defined(__AVX512F__)
  return "avx512f";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "";
#endif
}

#endif

}  // namespace tidemill
