// Park and resume: the part of the slot pool that moves state between live sequences and the arena.

#include <algorithm>
#include <utility>

#include "tidemill/slot_pool.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define TIDEMILL_POISON(p, n) ASAN_POISON_MEMORY_REGION(p, n)
#define TIDEMILL_UNPOISON(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#else
#define TIDEMILL_POISON(p, n) ((void)(p), (void)(n))
#define TIDEMILL_UNPOISON(p, n) ((void)(p), (void)(n))
#endif

namespace tidemill {
namespace {

constexpr std::size_t index(Lane lane) { return static_cast<std::size_t>(lane); }
constexpr Ticket ticket_of(Lane lane, std::uint64_t number) { return number << 1 | index(lane); }

}  // namespace

std::optional<Ticket> SlotPool::park(Handle h, const void* from, std::size_t n, After after) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want(i, {State::Prefill, State::Active}, "park");
  if (!take_block(i, n)) return std::nullopt;
  try {
    const auto number = arena_->submit(Lane::In, block(i).data, from, n, std::move(after));
    submitted_[index(Lane::In)] = number;
    in_flight_[index(Lane::In)].push_back({number, i});
    phase_[i] = state_[i];
    drain_[i] = Drain::ParkCopy;
    enter(i, State::Draining);
    return ticket_of(Lane::In, number);
  } catch (...) {
    give_block(i);
    throw;
  }
}

std::optional<Ticket> SlotPool::resume(Handle h, void* to, std::size_t n, After after) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want(i, {State::Parked}, "resume");
  if (n != saved_[i]) {
    throw std::invalid_argument("the parked state has " + std::to_string(saved_[i]) +
                                " bytes, room was given for " + std::to_string(n));
  }
  if (!take_seq(i)) return std::nullopt;
  try {
    const auto number = arena_->submit(Lane::Out, to, block(i).data, n, std::move(after));
    submitted_[index(Lane::Out)] = number;
    in_flight_[index(Lane::Out)].push_back({number, i});
    dequeue(i);
    drain_[i] = Drain::ResumeCopy;
    enter(i, State::Draining);
    return ticket_of(Lane::Out, number);
  } catch (...) {
    give_seq(i);
    throw;
  }
}

std::optional<Block> SlotPool::park_open(Handle h, std::size_t n) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want(i, {State::Prefill, State::Active}, "park_open");
  if (!take_block(i, n)) return std::nullopt;
  phase_[i] = state_[i];
  drain_[i] = Drain::ParkLent;
  enter(i, State::Draining);
  return block(i);
}

void SlotPool::park_close(Handle h, std::size_t used) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want_drain(i, Drain::ParkLent, "park_close");
  if (used > saved_[i]) {
    throw std::invalid_argument(std::to_string(used) + " bytes were not lent, only " +
                                std::to_string(saved_[i]));
  }
  if (used == 0 && doomed_[i] == 0) {
    give_block(i);
    end_drain(i, phase_[i]);
    return;
  }
  if (used > 0) {
    room_.shrink(offset_[i], saved_[i], used);
    const std::size_t keep = FreeList::rounded(used);
    TIDEMILL_POISON(arena_->base() + offset_[i] + keep, FreeList::rounded(saved_[i]) - keep);
    saved_[i] = used;
  }
  landed(i);
}

std::optional<Resumed> SlotPool::resume_open(Handle h, std::optional<std::uint32_t> seq) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want(i, {State::Parked}, "resume_open");
  if (!take_seq(i, seq)) return std::nullopt;
  dequeue(i);
  drain_[i] = Drain::ResumeLent;
  enter(i, State::Draining);
  return Resumed{static_cast<std::uint32_t>(seq_[i]), block(i)};
}

void SlotPool::resume_close(Handle h, bool ok) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want_drain(i, Drain::ResumeLent, "resume_close");
  if (ok || doomed_[i] != 0) {
    landed(i);
    return;
  }
  give_block(i);
  give_seq(i);
  weight_[i] = 0;
  ++requeues_;
  end_drain(i, State::Staged);
}

void SlotPool::resume_keep(Handle h) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want_drain(i, Drain::ResumeLent, "resume_keep");
  if (doomed_[i] != 0) {
    landed(i);
    return;
  }
  ++resumes_;
  give_seq(i);
  end_drain(i, State::Parked);
}

std::vector<Handle> SlotPool::poll() {
  const std::lock_guard lock(mutex_);
  return poll_locked();
}

std::vector<Handle> SlotPool::wait(Ticket ticket) {
  const Lane lane = kLanes[ticket & 1];
  const std::uint64_t number = ticket >> 1;
  {
    const std::lock_guard lock(mutex_);
    if (number == 0 || number > submitted_[index(lane)]) {
      throw std::invalid_argument("there is no ticket " + std::to_string(ticket));
    }
  }
  arena_->wait(lane, number);
  const std::lock_guard lock(mutex_);
  return poll_locked();
}

std::vector<Handle> SlotPool::poll_locked() {
  std::vector<Handle> settled;
  for (const Lane lane : kLanes) {
    if (!in_flight_[index(lane)].empty()) observe(lane, arena_->reached(lane), settled);
  }
  return settled;
}

void SlotPool::observe(Lane lane, std::uint64_t reached, std::vector<Handle>& settled) {
  auto& queue = in_flight_[index(lane)];
  while (!queue.empty() && queue.front().number <= reached) {
    const Index i = queue.front().slot;
    queue.pop_front();
    landed(i);
    settled.push_back(handle(i));
  }
}

void SlotPool::landed(Index i) {
  const bool parking = drain_[i] == Drain::ParkCopy || drain_[i] == Drain::ParkLent;
  if (doomed_[i] != 0) {
    give_seq(i);
    give_block(i);
    end_drain(i, State::Done);
  } else if (parking) {
    ++parks_;
    give_seq(i);
    end_drain(i, State::Parked);
  } else {
    ++resumes_;
    give_block(i);
    end_drain(i, phase_[i]);
  }
}

void SlotPool::end_drain(Index i, State state) {
  drain_[i] = Drain::None;
  if (state == State::Parked || state == State::Staged) {
    enqueue(i, state);
  } else {
    enter(i, state);
  }
}

bool SlotPool::take_block(Index i, std::size_t n) {
  if (n == 0) throw std::invalid_argument("there is nothing to park");
  const auto offset = room_.take(n);
  if (!offset) {
    ++refused_;
    return false;
  }
  offset_[i] = *offset;
  saved_[i] = n;
  peak_ = std::max(peak_, room_.total() - room_.free());
  TIDEMILL_UNPOISON(arena_->base() + *offset, FreeList::rounded(n));
  return true;
}

void SlotPool::give_block(Index i) {
  if (saved_[i] == 0) return;
  TIDEMILL_POISON(arena_->base() + offset_[i], FreeList::rounded(saved_[i]));
  room_.give(offset_[i], saved_[i]);
  saved_[i] = 0;
}

}  // namespace tidemill
