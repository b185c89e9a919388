#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace tidemill {

/// Which parts of an arena are free. Best fit (the smallest hole, then the lowest offset); holes that touch
/// are one hole. Every operation is O(log holes).
///
///     offset  0        256      1024                 4096
///             |  taken |  hole  |       taken        |      hole …      bytes
///
/// Invariant: taken + holes = total, and no two holes touch.
class FreeList {
 public:
  /// Sizes are rounded up to this: a cache-line pair, and what device copies like best.
  static constexpr std::size_t kAlign = 256;
  static constexpr std::size_t rounded(std::size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

  explicit FreeList(std::size_t bytes);

  /// Offset of a block of at least `n` bytes, or nothing when no hole is large enough. `n` > 0.
  std::optional<std::size_t> take(std::size_t n);

  /// Give back a block as it was taken (or shrunk).
  void give(std::size_t offset, std::size_t n);

  /// Keep the first `to` bytes of a block of `from` bytes. 0 < `to` <= `from`.
  void shrink(std::size_t offset, std::size_t from, std::size_t to);

  [[nodiscard]] std::size_t total() const { return total_; }
  [[nodiscard]] std::size_t free() const { return free_; }
  [[nodiscard]] std::size_t largest() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  [[nodiscard]] const std::map<std::size_t, std::size_t>& holes() const { return by_offset_; }

 private:
  void add(std::size_t offset, std::size_t n);
  void drop(std::map<std::size_t, std::size_t>::iterator hole);

  std::size_t total_;
  std::size_t free_;
  std::map<std::size_t, std::size_t> by_offset_;
  std::set<std::pair<std::size_t, std::size_t>> by_size_;
};

}  // namespace tidemill
