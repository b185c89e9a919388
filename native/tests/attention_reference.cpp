// Attention against the same in double precision: all shapes, masks and things in common.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "must.hpp"
#include "tidemill/attention.hpp"

using tidemill::Attention;
using tidemill::Beginning;

namespace {

using Half = std::uint16_t;
constexpr Half kNever = 0xFC00;

/// A half of some digits, as its bits and as its value.
struct Number {
  Half bits;
  double value;
};

Number half(std::mt19937& random) {
  const int exponent = static_cast<int>(random() % 4) - 3;  // 1/8 .. 1
  const unsigned digits = random() % 1024;
  const bool negative = random() % 2 == 0;
  const double value = std::ldexp(1.0 + digits / 1024.0, exponent);
  return {static_cast<Half>((negative ? 0x8000U : 0U) | static_cast<unsigned>(exponent + 15) << 10 | digits),
          negative ? -value : value};
}

struct Case {
  std::size_t size, kv_heads, group, streams, queries, keys;
  bool window, masked;
  int threads;
};

/// Keys or values: [stream][key][head][size], with room between the streams.
struct Memory {
  std::vector<Half> bits;
  std::vector<double> values;
  std::size_t key, stream;

  Memory(const Case& c, std::mt19937& random) : key(c.kv_heads * c.size), stream((c.keys + 3) * key) {
    // To the last number and no further, so that reading beyond it is seen.
    const std::size_t n = stream * (c.streams - 1) + c.keys * key;
    for (std::size_t i = 0; i < n; ++i) {
      const Number one = half(random);
      bits.push_back(one.bits);
      values.push_back(one.value);
    }
  }
  void copy(std::size_t from, std::size_t to, std::size_t length) {
    std::copy_n(bits.begin() + static_cast<std::ptrdiff_t>(from * stream), length * key,
                bits.begin() + static_cast<std::ptrdiff_t>(to * stream));
    std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(from * stream), length * key,
                values.begin() + static_cast<std::ptrdiff_t>(to * stream));
  }
};

void check(const Case& c, std::mt19937& random) {
  const std::size_t heads = c.kv_heads * c.group;
  Memory k(c, random);
  Memory v(c, random);
  std::vector<float> q;
  for (std::size_t i = 0; i < c.streams * c.queries * heads * c.size; ++i) q.push_back(static_cast<float>(half(random).value));

  // Streams 0, 2, 4 .. begin alike, each as far as chance has it; the last one's claim may be longer than its mask.
  std::vector<Beginning> beginnings(c.streams);
  const std::size_t most = c.keys > c.queries ? c.keys - c.queries : 0;
  for (std::size_t s = 0; s < c.streams; s += 2) {
    const std::size_t length = most == 0 ? 0 : random() % (most + 1);
    if (s > 0) {
      k.copy(0, s, length);
      v.copy(0, s, length);
    }
    beginnings[s] = {7, static_cast<std::int32_t>(s == 0 ? most : length)};
  }
  std::vector<Half> mask(c.streams * c.queries * c.keys, kNever);
  for (std::size_t s = 0; s < c.streams; ++s) {
    const std::size_t end = c.keys - (c.keys > c.queries ? random() % std::min<std::size_t>(40, c.keys - c.queries) : 0);
    for (std::size_t i = 0; i < c.queries; ++i) {
      const std::size_t to = i + end >= c.queries ? i + 1 + end - c.queries : 0;
      const std::size_t from = c.window && to > 20 ? to - 20 : 0;
      for (std::size_t j = from; j < to; ++j) mask[(s * c.queries + i) * c.keys + j] = 0;
    }
  }
  std::vector<float> out(c.streams * c.queries * heads * c.size, std::nanf(""));

  Attention a{};
  a.size = c.size, a.heads = heads, a.kv_heads = c.kv_heads, a.streams = c.streams, a.queries = c.queries, a.keys = c.keys;
  a.scale = 0.5F;
  a.q = reinterpret_cast<const char*>(q.data());
  a.q_head = c.size * sizeof(float), a.q_query = heads * a.q_head, a.q_stream = c.queries * a.q_query;
  a.k = reinterpret_cast<const char*>(k.bits.data());
  a.k_head = c.size * sizeof(Half), a.k_key = k.key * sizeof(Half), a.k_stream = k.stream * sizeof(Half);
  a.v = reinterpret_cast<const char*>(v.bits.data());
  a.v_head = a.k_head, a.v_key = a.k_key, a.v_stream = a.k_stream;
  if (c.masked) {
    a.mask = reinterpret_cast<const char*>(mask.data());
    a.mask_query = c.keys * sizeof(Half), a.mask_stream = c.queries * a.mask_query;
  }
  a.out = out.data();

  for (const bool told : {false, true}) {
    a.beginnings = told ? beginnings.data() : nullptr;
    std::fill(out.begin(), out.end(), std::nanf(""));
    tidemill::attend(a, c.threads);
    for (std::size_t row = 0; row < c.streams * c.queries * heads; ++row) {
      const std::size_t s = row / (c.queries * heads);
      const std::size_t i = row / heads % c.queries;
      const std::size_t at = row % heads / c.group * c.size;
      std::vector<double> weights(c.keys, 0.0);
      double largest = -std::numeric_limits<double>::infinity();
      for (std::size_t j = 0; j < c.keys; ++j) {
        double score = 0;
        for (std::size_t d = 0; d < c.size; ++d) score += q[row * c.size + d] * k.values[s * k.stream + j * k.key + at + d];
        weights[j] = 0.5 * score;
        if (c.masked && mask[(s * c.queries + i) * c.keys + j] == kNever) weights[j] = -std::numeric_limits<double>::infinity();
        largest = std::max(largest, weights[j]);
      }
      double total = 0;
      for (double& weight : weights) total += weight = std::isinf(weight) ? 0.0 : std::exp(weight - largest);
      for (std::size_t d = 0; d < c.size; ++d) {
        double expected = 0;
        for (std::size_t j = 0; j < c.keys; ++j) expected += weights[j] * v.values[s * v.stream + j * v.key + at + d];
        if (total > 0) expected /= total;
        MUST(std::abs(expected - out[row * c.size + d]) < 2e-5);
      }
    }
  }
}

}  // namespace

void attend_as_in_double_precision() {
  if (!tidemill::attends(64)) return;
  std::mt19937 random(5);
  // size, kv_heads, group, streams, queries, keys, window, masked, threads
  check({64, 3, 3, 5, 1, 200, false, true, 1}, random);    // answers that grow
  check({64, 3, 3, 1, 1, 1, false, true, 1}, random);      // the first token there is
  check({64, 1, 8, 3, 3, 129, false, true, 1}, random);    // one head of keys, and drafts
  check({80, 2, 1, 2, 70, 70, false, true, 1}, random);    // a prompt
  check({96, 1, 2, 4, 17, 90, true, true, 1}, random);     // a sliding window
  check({128, 2, 4, 6, 1, 65, false, true, 3}, random);
  check({256, 1, 1, 3, 5, 100, false, true, 2}, random);
  check({64, 2, 2, 2, 40, 40, false, false, 1}, random);   // everybody sees everything
  check({64, 1, 1, 2, 9, 4, false, true, 1}, random);      // some see nothing
  check({64, 1, 4, 1, 1, 1100, false, true, 8}, random);   // one long answer, whose keys are divided among threads
  check({64, 1, 1, 1, 2, 900, false, false, 16}, random);
  check({128, 1, 2, 3, 1, 700, false, true, 5}, random);   // and what some have in common
  check({80, 1, 3, 2, 3, 600, false, true, 3}, random);
  for (int i = 0; i < 60; ++i) {
    const std::size_t sizes[] = {64, 80, 96, 128};
    const std::size_t keys = 20 + random() % 150 + (i % 6 == 0 ? 512 : 0);
    check({sizes[random() % 4], 1 + random() % 3, 1 + random() % 4, 1 + random() % 6, 1 + random() % 12, keys,
           random() % 8 == 0, random() % 8 != 0, static_cast<int>(1 + random() % (i % 6 == 0 ? 24 : 3))},
          random);
  }
}
