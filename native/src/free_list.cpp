#include "tidemill/free_list.hpp"

#include <iterator>

namespace tidemill {

FreeList::FreeList(std::size_t bytes) : total_(bytes / kAlign * kAlign), free_(total_) {
  if (total_ > 0) {
    by_offset_.emplace(0, total_);
    by_size_.emplace(total_, 0);
  }
}

std::optional<std::size_t> FreeList::take(std::size_t n) {
  const std::size_t need = rounded(n);
  const auto fit = by_size_.lower_bound({need, 0});
  if (fit == by_size_.end()) return std::nullopt;
  const auto [size, offset] = *fit;
  drop(by_offset_.find(offset));
  if (size > need) add(offset + need, size - need);
  return offset;
}

void FreeList::give(std::size_t offset, std::size_t n) { add(offset, rounded(n)); }

void FreeList::shrink(std::size_t offset, std::size_t from, std::size_t to) {
  const std::size_t had = rounded(from);
  const std::size_t keep = rounded(to);
  if (keep < had) add(offset + keep, had - keep);
}

void FreeList::add(std::size_t offset, std::size_t n) {
  std::size_t start = offset;
  std::size_t size = n;
  const auto next = by_offset_.find(offset + n);
  if (next != by_offset_.end()) {
    size += next->second;
    drop(next);
  }
  const auto after = by_offset_.lower_bound(offset);
  if (after != by_offset_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      start = before->first;
      size += before->second;
      drop(before);
    }
  }
  by_offset_.emplace(start, size);
  by_size_.emplace(size, start);
  free_ += size;
}

void FreeList::drop(std::map<std::size_t, std::size_t>::iterator hole) {
  free_ -= hole->second;
  by_size_.erase({hole->second, hole->first});
  by_offset_.erase(hole);
}

}  // namespace tidemill
