#pragma once

#include <cstddef>
#include <cstdint>

namespace tidemill {

/// That the first `length` keys and values of all streams of a group (>= 0) are the same, bit for bit.
struct Beginning {
  std::int32_t group = -1;
  std::int32_t length = 0;
};

/// Attention of some queries of some streams, each over the keys and values of its own stream. All steps are in bytes.
/// Keys, values and the mask are IEEE halves, each head's numbers side by side.
struct Attention {
  std::size_t size;      ///< numbers of a head; see `attends`
  std::size_t heads;     ///< of the queries; a multiple of `kv_heads`
  std::size_t kv_heads;
  std::size_t streams;
  std::size_t queries;   ///< of each stream
  std::size_t keys;      ///< of each stream; the mask says which are there
  float scale;

  const char* q;  ///< float; q[stream][head][query][size]
  std::size_t q_query, q_head, q_stream;
  const char* k;
  std::size_t k_key, k_head, k_stream;
  const char* v;
  std::size_t v_key, v_head, v_stream;
  const char* mask;  ///< mask[stream][query][key], added to the scores; null: every key is seen
  std::size_t mask_query, mask_stream;
  float* out;  ///< out[stream][query][head][size]

  const Beginning* beginnings;  ///< of each stream; null: nothing is known to be the same
};

/// Compute `out`, with up to `threads` threads. What streams have in common is read once for all of them.
/// Rounds as single precision does, in an order that depends on shapes, `beginnings` and `threads` only.
void attend(const Attention& attention, int threads);

/// Whether `attend` has code for heads of this size; false for all where it was compiled for a processor that it does
/// not know.
bool attends(std::size_t size);

/// What the processor must have to run `attend`, as compilers name it: "avx512f", "avx2", or nothing that others of its
/// kind lack. Null: there is no code at all.
const char* attention_needs();

}  // namespace tidemill
