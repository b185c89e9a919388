#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tidemill {

/// The slots of one priority class that wait, oldest first: a binary heap of slot numbers that knows where each
/// one stands, so that any of them leaves in O(log n). `age` and `place` are arrays over all slots, shared by the
/// queues of all classes (a slot waits in one queue at most).
class ClassQueue {
 public:
  static constexpr std::int32_t kNowhere = -1;

  [[nodiscard]] bool empty() const { return heap_.empty(); }
  [[nodiscard]] std::size_t size() const { return heap_.size(); }
  [[nodiscard]] std::uint32_t head() const { return heap_.front(); }
  [[nodiscard]] const std::vector<std::uint32_t>& heap() const { return heap_; }

  void push(std::uint32_t slot, const std::vector<std::uint64_t>& age, std::vector<std::int32_t>& place) {
    place[slot] = static_cast<std::int32_t>(heap_.size());
    heap_.push_back(slot);
    up(heap_.size() - 1, age, place);
  }

  void remove(std::uint32_t slot, const std::vector<std::uint64_t>& age, std::vector<std::int32_t>& place) {
    const auto at = static_cast<std::size_t>(place[slot]);
    place[slot] = kNowhere;
    const std::uint32_t last = heap_.back();
    heap_.pop_back();
    if (last == slot) return;
    heap_[at] = last;
    place[last] = static_cast<std::int32_t>(at);
    up(at, age, place);
    down(static_cast<std::size_t>(place[last]), age, place);
  }

 private:
  void swap(std::size_t a, std::size_t b, std::vector<std::int32_t>& place) {
    std::swap(heap_[a], heap_[b]);
    place[heap_[a]] = static_cast<std::int32_t>(a);
    place[heap_[b]] = static_cast<std::int32_t>(b);
  }

  void up(std::size_t at, const std::vector<std::uint64_t>& age, std::vector<std::int32_t>& place) {
    while (at > 0) {
      const std::size_t parent = (at - 1) / 2;
      if (age[heap_[parent]] <= age[heap_[at]]) return;
      swap(at, parent, place);
      at = parent;
    }
  }

  void down(std::size_t at, const std::vector<std::uint64_t>& age, std::vector<std::int32_t>& place) {
    for (;;) {
      std::size_t least = at;
      for (const std::size_t child : {2 * at + 1, 2 * at + 2}) {
        if (child < heap_.size() && age[heap_[child]] < age[heap_[least]]) least = child;
      }
      if (least == at) return;
      swap(at, least, place);
      at = least;
    }
  }

  std::vector<std::uint32_t> heap_;
};

}  // namespace tidemill
