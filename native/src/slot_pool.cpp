#include "tidemill/slot_pool.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace tidemill {

const char* name(State state) {
  static constexpr std::array<const char*, kStates> kNames{
      "FREE", "RESERVED", "STAGED", "PREFILL", "ACTIVE", "PARKED", "DRAINING", "DONE"};
  return kNames[static_cast<std::size_t>(state)];
}

SlotPool::SlotPool(std::uint32_t slots, std::uint32_t live, std::uint32_t classes, std::size_t arena_bytes,
                   ArenaChoice arena)
    : live_max_(live), room_(arena_bytes) {
  if (slots == 0 || slots > (1U << 20)) throw std::invalid_argument("slots must be 1 to 1,048,576");
  if (live == 0 || live > kMaxLive) throw std::invalid_argument("live must be 1 to 256");
  if (classes == 0 || classes > kMaxClasses) throw std::invalid_argument("classes must be 1 to 8");
  generation_.assign(slots, 1);
  state_.assign(slots, State::Free);
  phase_.assign(slots, State::Active);
  drain_.assign(slots, Drain::None);
  doomed_.assign(slots, 0);
  klass_.assign(slots, 0);
  seq_.assign(slots, kNoSeq);
  age_.assign(slots, 0);
  weight_.assign(slots, 0);
  offset_.assign(slots, 0);
  saved_.assign(slots, 0);
  place_.assign(slots, ClassQueue::kNowhere);
  free_.reserve(slots);
  for (Index i = slots; i-- > 0;) free_.push_back(i);
  queues_.resize(classes);
  holder_.assign(live, kNoSlot);
  for (std::uint32_t s = 0; s < live; ++s) free_seqs_[s / 64] |= std::uint64_t{1} << s % 64;
  count_[static_cast<std::size_t>(State::Free)] = slots;

  if (arena != ArenaChoice::Host && room_.total() > 0) {
    arena_ = make_cuda_arena(room_.total(), live, note_);
    if (!arena_ && arena == ArenaChoice::Cuda) {
      throw std::invalid_argument("arena=\"cuda\" is not possible: " + note_);
    }
  }
  if (!arena_) arena_ = make_host_arena(room_.total());
}

// --- the life of a slot

std::vector<Handle> SlotPool::reserve(std::uint32_t n, std::uint32_t klass) {
  const std::lock_guard lock(mutex_);
  check_class(klass);
  if (n == 0) throw std::invalid_argument("a group has at least one slot");
  std::vector<Handle> group;
  if (n > free_.size()) return group;
  group.reserve(n);
  for (std::uint32_t k = 0; k < n; ++k) {
    const Index i = free_.back();
    free_.pop_back();
    klass_[i] = static_cast<std::uint8_t>(klass);
    age_[i] = next_age_++;
    enter(i, State::Reserved);
    group.push_back(handle(i));
  }
  return group;
}

void SlotPool::stage(Handle h) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want(i, {State::Reserved}, "stage");
  enqueue(i, State::Staged);
}

std::optional<std::uint32_t> SlotPool::start(Handle h, std::optional<std::uint32_t> seq) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want(i, {State::Staged}, "start");
  if (!take_seq(i, seq)) return std::nullopt;
  dequeue(i);
  enter(i, State::Prefill);
  return seq_[i];
}

void SlotPool::activate(Handle h) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want(i, {State::Prefill}, "activate");
  enter(i, State::Active);
}

void SlotPool::requeue(Handle h) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want(i, {State::Prefill, State::Active, State::Parked}, "requeue");
  if (state_[i] == State::Parked) {
    give_block(i);
    dequeue(i);
  } else {
    give_seq(i);
  }
  weight_[i] = 0;
  ++requeues_;
  enqueue(i, State::Staged);
}

bool SlotPool::finish(Handle h) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want(i,
       {State::Reserved, State::Staged, State::Prefill, State::Active, State::Parked, State::Draining},
       "finish");
  if (state_[i] == State::Draining) {
    doomed_[i] = 1;
    return false;
  }
  if (place_[i] != ClassQueue::kNowhere) dequeue(i);
  give_seq(i);
  give_block(i);
  enter(i, State::Done);
  return true;
}

void SlotPool::release(Handle h) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want(i, {State::Done}, "release");
  weight_[i] = 0;
  doomed_[i] = 0;
  if (++generation_[i] == 0) generation_[i] = 1;
  enter(i, State::Free);
  free_.push_back(i);
}

void SlotPool::lift(Handle h, std::uint32_t klass) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  check_class(klass);
  want(i,
       {State::Reserved, State::Staged, State::Prefill, State::Active, State::Parked, State::Draining},
       "lift");
  const bool waits = place_[i] != ClassQueue::kNowhere;
  if (waits) dequeue(i);
  klass_[i] = static_cast<std::uint8_t>(klass);
  if (waits) queues_[klass].push(i, age_, place_);
}

std::optional<std::uint32_t> SlotPool::move(Handle h, std::optional<std::uint32_t> seq) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want(i, {State::Prefill, State::Active}, "move");
  const std::int16_t own = seq_[i];
  if (!take_seq(i, seq)) return std::nullopt;
  const std::int16_t other = seq_[i];
  const bool moves = seq || other < own;
  seq_[i] = moves ? own : other;
  give_seq(i);
  seq_[i] = moves ? other : own;
  if (!moves) return std::nullopt;
  return other;
}

// --- who is next, who makes way

std::optional<Handle> SlotPool::head(std::optional<std::uint32_t> klass) const {
  const std::lock_guard lock(mutex_);
  if (klass) {
    check_class(*klass);
    return queues_[*klass].empty() ? std::nullopt : std::optional(handle(queues_[*klass].head()));
  }
  for (const ClassQueue& queue : queues_) {
    if (!queue.empty()) return handle(queue.head());
  }
  return std::nullopt;
}

std::optional<Handle> SlotPool::victim(std::uint32_t klass) const {
  const std::lock_guard lock(mutex_);
  check_class(klass);
  const std::size_t largest = room_.largest();
  Index best = kNoSlot;
  for (const Index i : holder_) {
    if (i == kNoSlot || state_[i] == State::Draining || klass_[i] <= klass) continue;
    if (FreeList::rounded(std::max<std::size_t>(weight_[i], 1)) > largest) continue;
    if (best == kNoSlot || klass_[i] > klass_[best] || (klass_[i] == klass_[best] && age_[i] > age_[best])) {
      best = i;
    }
  }
  return best == kNoSlot ? std::nullopt : std::optional(handle(best));
}

void SlotPool::weigh(Handle h, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  want(i, {State::Prefill, State::Active}, "weigh");
  weight_[i] = bytes;
}

// --- looking

State SlotPool::state(Handle h) const {
  const std::lock_guard lock(mutex_);
  return state_[at(h)];
}

std::optional<std::uint32_t> SlotPool::seq(Handle h) const {
  const std::lock_guard lock(mutex_);
  const Index i = at(h);
  return seq_[i] == kNoSeq ? std::nullopt : std::optional<std::uint32_t>(seq_[i]);
}

std::uint32_t SlotPool::klass(Handle h) const {
  const std::lock_guard lock(mutex_);
  return klass_[at(h)];
}

std::uint64_t SlotPool::age(Handle h) const {
  const std::lock_guard lock(mutex_);
  return age_[at(h)];
}

std::size_t SlotPool::parked(Handle h) const {
  const std::lock_guard lock(mutex_);
  return saved_[at(h)];
}

std::vector<Handle> SlotPool::live() const {
  const std::lock_guard lock(mutex_);
  std::vector<Handle> all;
  for (const Index i : holder_) {
    if (i != kNoSlot) all.push_back(handle(i));
  }
  return all;
}

std::uint32_t SlotPool::waiting(std::optional<std::uint32_t> klass) const {
  const std::lock_guard lock(mutex_);
  if (klass) {
    check_class(*klass);
    return static_cast<std::uint32_t>(queues_[*klass].size());
  }
  std::size_t all = 0;
  for (const ClassQueue& queue : queues_) all += queue.size();
  return static_cast<std::uint32_t>(all);
}

// --- inside

SlotPool::Index SlotPool::at(Handle h) const {
  const auto i = static_cast<Index>(h);
  const auto generation = static_cast<std::uint32_t>(h >> 32);
  if (i >= state_.size() || generation != generation_[i] || state_[i] == State::Free) {
    throw StaleHandle("no slot has handle " + std::to_string(h) + ": it was released, or never reserved");
  }
  return i;
}

void SlotPool::want(Index i, std::initializer_list<State> from, const char* call) const {
  const bool ending = doomed_[i] != 0 && state_[i] == State::Draining;
  if (!ending && std::find(from.begin(), from.end(), state_[i]) != from.end()) return;
  throw IllegalTransition(std::string(call) + " does not leave from " + name(state_[i]) +
                          (ending ? " of a finished slot" : "") + " (slot " + std::to_string(i) + ")");
}

void SlotPool::want_drain(Index i, Drain drain, const char* call) const {
  if (drain_[i] == drain) return;
  throw IllegalTransition(std::string(call) + " closes a block that was not lent for it (slot " +
                          std::to_string(i) + ", " + name(state_[i]) + ")");
}

void SlotPool::check_class(std::uint32_t klass) const {
  if (klass >= queues_.size()) {
    throw std::invalid_argument("there is no class " + std::to_string(klass) + " among " +
                                std::to_string(queues_.size()));
  }
}

void SlotPool::enter(Index i, State state) {
  --count_[static_cast<std::size_t>(state_[i])];
  ++count_[static_cast<std::size_t>(state)];
  state_[i] = state;
}

void SlotPool::enqueue(Index i, State state) {
  enter(i, state);
  queues_[klass_[i]].push(i, age_, place_);
}

void SlotPool::dequeue(Index i) { queues_[klass_[i]].remove(i, age_, place_); }

bool SlotPool::take_seq(Index i, std::optional<std::uint32_t> wanted) {
  if (wanted) {
    if (*wanted >= live_max_) {
      throw std::invalid_argument("there is no sequence id " + std::to_string(*wanted) + " among " +
                                  std::to_string(live_max_));
    }
    const std::uint64_t bit = std::uint64_t{1} << *wanted % 64;
    if ((free_seqs_[*wanted / 64] & bit) == 0) return false;
    free_seqs_[*wanted / 64] &= ~bit;
    seq_[i] = static_cast<std::int16_t>(*wanted);
    holder_[*wanted] = i;
    return true;
  }
  for (std::size_t word = 0; word < free_seqs_.size(); ++word) {
    if (free_seqs_[word] == 0) continue;
    const int bit = std::countr_zero(free_seqs_[word]);
    free_seqs_[word] &= free_seqs_[word] - 1;
    seq_[i] = static_cast<std::int16_t>(word * 64 + static_cast<std::size_t>(bit));
    holder_[static_cast<std::size_t>(seq_[i])] = i;
    return true;
  }
  return false;
}

void SlotPool::give_seq(Index i) {
  if (seq_[i] == kNoSeq) return;
  const auto s = static_cast<std::size_t>(seq_[i]);
  free_seqs_[s / 64] |= std::uint64_t{1} << s % 64;
  holder_[s] = kNoSlot;
  seq_[i] = kNoSeq;
}

}  // namespace tidemill
