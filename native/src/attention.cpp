// Attention on a CPU, for many streams that each ask little. Compiled for the processor at hand.

#include "tidemill/attention.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "tidemill/rows.hpp"

namespace tidemill {

#ifdef TIDEMILL_NO_LANES

void attend(const Attention&, int) {}
bool attends(std::size_t) { return false; }
const char* attention_needs() { return nullptr; }

#else

namespace {

constexpr std::size_t kTaskRows = 96;   ///< rows of queries that share what is read of keys and values
constexpr std::size_t kLeast = 32;      ///< keys in common that are worth a pass of their own
constexpr std::size_t kPart = 256;      ///< keys that are worth a thread of their own

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
  std::size_t from = 0, to = 0;  ///< the keys that any of them sees are in between
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
    if (threads == 1 || tasks.empty()) return;
    const std::size_t there = tasks.size() * a.kv_heads;
    const std::size_t wanted = (2 * static_cast<std::size_t>(threads) + there - 1) / there;
    parts = std::max<std::size_t>(1, std::min(wanted, longest_ / kPart));
  }

  std::vector<Task> tasks;
  std::size_t parts = 1;  ///< that the keys of each task are divided into, so that all threads have some
  [[nodiscard]] std::size_t queries() const { return most_; }

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
      if (task.queries > 0) {
        longest_ = std::max(longest_, task.to - std::min(task.from, task.to));
        tasks.push_back(task);
      }
      task = Task{};
      task.shared = task.to = shared;
      task.from = shared > 0 ? 0 : a_.keys;
    };
    flush();
    for (const std::size_t stream : streams) {
      for (std::size_t first = 0; first < a_.queries;) {
        const std::size_t count = std::min(a_.queries - first, most_ - task.queries);
        Segment segment{stream, first, count, a_.keys, 0};
        for (std::size_t i = first; i < first + count; ++i) widen(segment, i);
        segment.from = std::max(segment.from, shared);
        task.from = std::min(task.from, segment.from);
        task.to = std::max(task.to, segment.to);
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
  std::size_t most_;         ///< queries of a task
  std::size_t longest_ = 0;  ///< keys of a task
};

/// Where row `i` of a segment goes.
template <std::size_t D>
float* output(const Attention& a, const Segment& segment, std::size_t head, std::size_t i) {
  const std::size_t group = a.heads / a.kv_heads;
  const std::size_t query = segment.stream * a.queries + segment.first + i / group;
  return a.out + (query * a.heads + head * group + i % group) * D;
}

/// The part `part` of `parts` of the keys of a task and head: to `a.out` if it is the only one, else to `partials`.
template <std::size_t D>
void compute(const Attention& a, const Task& task, std::size_t head, std::size_t part, std::size_t parts,
             float* partials) {
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
  const std::size_t each = (task.to - std::min(task.from, task.to) + parts - 1) / parts;
  const std::size_t begin = task.from + part * each;
  const std::size_t end = begin + each;
  const auto see = [&](std::size_t first, std::size_t count, std::size_t stream, std::size_t from, std::size_t to,
                       const auto& mask) {
    from = std::max(from, begin);
    to = std::min(to, end);
    if (from >= to) return;
    const Half* k = halves(a.k, stream * a.k_stream + head * a.k_head + from * a.k_key);
    const Half* v = halves(a.v, stream * a.v_stream + head * a.v_head + from * a.v_key);
    rows.see(first, count, k, a.k_key / sizeof(Half), v, a.v_key / sizeof(Half), to - from, [&](std::size_t at) {
      const Half* all = mask(at);
      return all == nullptr ? nullptr : all + from;
    });
  };
  see(0, row, task.segments.front().stream, 0, task.shared, [](std::size_t) -> const Half* { return nullptr; });
  row = 0;
  for (const Segment& segment : task.segments) {
    const std::size_t count = segment.count * group;
    see(row, count, segment.stream, segment.from, segment.to, [&](std::size_t at) -> const Half* {
      if (a.mask == nullptr) return nullptr;
      const std::size_t query = segment.first + (at - row) / group;
      return halves(a.mask, segment.stream * a.mask_stream + query * a.mask_query);
    });
    for (std::size_t i = 0; i < count; ++i) {
      if (parts > 1) {
        rows.save(row + i, partials + (row + i) * kPartial<D>);
      } else {
        rows.write(row + i, output<D>(a, segment, head, i));
      }
    }
    row += count;
  }
}

template <std::size_t D>
void run(const Attention& a, int threads) {
  const Plan plan(a, threads);
  const std::size_t parts = plan.parts;
  const std::size_t group = a.heads / a.kv_heads;
  const std::size_t step = plan.queries() * group * kPartial<D>;
  const auto all = static_cast<std::int64_t>(plan.tasks.size() * a.kv_heads * parts);
  thread_local std::vector<float> saved;
  if (parts > 1) saved.resize(std::max(saved.size(), static_cast<std::size_t>(all) * step));
  float* partials = saved.data();
#ifdef _OPENMP  // the same threads as ggml's, which are awake between its operations
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
#endif
  for (std::int64_t i = 0; i < all; ++i) {
    const auto n = static_cast<std::size_t>(i);
    const std::size_t at = n / parts;
    compute<D>(a, plan.tasks[at / a.kv_heads], at % a.kv_heads, n % parts, parts,
               parts > 1 ? partials + n * step : nullptr);
  }
  if (parts == 1) return;
  for (std::size_t at = 0; at < plan.tasks.size() * a.kv_heads; ++at) {
    float* row = partials + at * parts * step;
    for (const Segment& segment : plan.tasks[at / a.kv_heads].segments) {
      for (std::size_t i = 0; i < segment.count * group; ++i, row += kPartial<D>) {
        join<D>(row, step, parts, output<D>(a, segment, at % a.kv_heads, i));
      }
    }
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
