// stats() and check(): the slot pool shows what it has, and that it adds up.

#include <algorithm>
#include <bit>
#include <utility>

#include "tidemill/slot_pool.hpp"

namespace tidemill {
namespace {

void hold(bool condition, const std::string& broken) {
  if (!condition) throw PoolBroken(broken);
}

}  // namespace

Stats SlotPool::stats() const {
  const std::lock_guard lock(mutex_);
  Stats s;
  s.slots = static_cast<std::uint32_t>(state_.size());
  s.live_max = live_max_;
  s.live = static_cast<std::uint32_t>(
      std::count_if(holder_.begin(), holder_.end(), [](Index i) { return i != kNoSlot; }));
  s.states = count_;
  for (const ClassQueue& queue : queues_) s.waiting.push_back(static_cast<std::uint32_t>(queue.size()));
  for (const auto& queue : in_flight_) s.in_flight += static_cast<std::uint32_t>(queue.size());
  s.parks = parks_;
  s.resumes = resumes_;
  s.requeues = requeues_;
  s.refused = refused_;
  s.arena_kind = arena_->kind();
  s.arena_note = note_;
  s.arena_pinned = arena_->pinned();
  s.arena_bytes = room_.total();
  s.arena_free = room_.free();
  s.arena_used = room_.total() - room_.free();
  s.arena_largest = room_.largest();
  s.arena_peak = peak_;
  s.arena_blocks = static_cast<std::uint32_t>(
      std::count_if(saved_.begin(), saved_.end(), [](std::size_t n) { return n > 0; }));
  return s;
}

void SlotPool::check() const {
  const std::lock_guard lock(mutex_);
  std::array<std::uint32_t, kStates> seen{};
  std::size_t queued = 0;
  std::uint32_t with_seq = 0;
  std::vector<std::pair<std::size_t, std::size_t>> blocks;
  for (Index i = 0; i < state_.size(); ++i) {
    const State state = state_[i];
    const std::string slot = "slot " + std::to_string(i) + " (" + name(state) + ")";
    ++seen[static_cast<std::size_t>(state)];
    const bool lives = state == State::Prefill || state == State::Active || state == State::Draining;
    const bool waits = state == State::Staged || state == State::Parked;
    const bool stored = state == State::Parked || state == State::Draining;
    hold((seq_[i] != kNoSeq) == lives, slot + " and its sequence id disagree");
    hold((place_[i] != ClassQueue::kNowhere) == waits, slot + " and its queue disagree");
    hold((saved_[i] > 0) == stored, slot + " and its block disagree");
    hold((drain_[i] != Drain::None) == (state == State::Draining), slot + " and its copy disagree");
    if (lives) {
      ++with_seq;
      hold(holder_[static_cast<std::size_t>(seq_[i])] == i, slot + " does not hold its sequence id");
    }
    if (waits) {
      ++queued;
      const auto& heap = queues_[klass_[i]].heap();
      const auto at = static_cast<std::size_t>(place_[i]);
      hold(at < heap.size() && heap[at] == i, slot + " is not where it waits");
      hold(at == 0 || age_[heap[(at - 1) / 2]] <= age_[i], slot + " waits before an older one");
    }
    if (stored) blocks.emplace_back(offset_[i], FreeList::rounded(saved_[i]));
  }
  hold(seen == count_, "slots of each state do not match their counts");
  hold(free_.size() == seen[static_cast<std::size_t>(State::Free)], "free + used is not the total");
  std::size_t in_queues = 0;
  for (const ClassQueue& queue : queues_) in_queues += queue.size();
  hold(in_queues == queued, "a queue holds a slot that does not wait");
  std::uint32_t free_ids = 0;
  for (const std::uint64_t word : free_seqs_) free_ids += static_cast<std::uint32_t>(std::popcount(word));
  hold(free_ids + with_seq == live_max_, "free + used sequence ids are not the total");

  for (const auto& hole : room_.holes()) blocks.push_back(hole);
  std::sort(blocks.begin(), blocks.end());
  std::size_t edge = 0;
  bool after_hole = false;
  for (const auto& [offset, n] : blocks) {
    hold(offset == edge, "the arena has a gap or an overlap at " + std::to_string(edge));
    const bool is_hole = room_.holes().contains(offset);
    hold(!(is_hole && after_hole), "two holes touch at " + std::to_string(offset));
    after_hole = is_hole;
    edge = offset + n;
  }
  hold(edge == room_.total(), "the arena's blocks and holes do not fill it");
}

}  // namespace tidemill
