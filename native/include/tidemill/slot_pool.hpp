#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tidemill/arena.hpp"
#include "tidemill/class_queue.hpp"
#include "tidemill/free_list.hpp"

namespace tidemill {

/// States of a slot.
///
///     FREE ─ reserve ─ RESERVED ─ stage ─ STAGED ─ start ─ PREFILL ─ activate ─ ACTIVE
///      │                                    │ ▲               │    ▲              │  ▲
///      │                                    │ └── requeue ────┴────┼──────────────┘  │
///      │                                    │ ▲                    └─────┐           │
///      │                                    │ └── requeue ─ PARKED ══ DRAINING ══════╛  (a copy is in flight)
///      └────────── release ─ DONE ──────────┴─ finish, from everywhere but FREE and DONE
///
/// PREFILL, ACTIVE and DRAINING hold a sequence id; PARKED and DRAINING hold a block of the arena; STAGED and
/// PARKED wait in the queue of their class.
enum class State : std::uint8_t { Free, Reserved, Staged, Prefill, Active, Parked, Draining, Done };
inline constexpr std::size_t kStates = 8;
const char* name(State state);

/// generation << 32 | index. The generation starts at 1, so 0 is never a handle.
using Handle = std::uint64_t;

/// Names a copy: its number within the lane and the lane.
using Ticket = std::uint64_t;

/// The handle's slot was released since, or it never was a handle of this pool.
struct StaleHandle : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// The slot is in a state that this call does not leave from.
struct IllegalTransition : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// check() found that the pool does not add up.
struct PoolBroken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Bytes of the arena that the caller may read and write until it closes the block.
struct Block {
  std::byte* data;
  std::size_t bytes;
};
struct Resumed {
  std::uint32_t seq;
  Block block;
};

struct Stats {
  std::uint32_t slots = 0;
  std::uint32_t live = 0;
  std::uint32_t live_max = 0;
  std::array<std::uint32_t, kStates> states{};
  std::vector<std::uint32_t> waiting;
  std::uint32_t in_flight = 0;
  std::uint64_t parks = 0;
  std::uint64_t resumes = 0;
  std::uint64_t requeues = 0;
  std::uint64_t refused = 0;
  std::string arena_kind;
  std::string arena_note;
  bool arena_pinned = false;
  std::size_t arena_bytes = 0;
  std::size_t arena_used = 0;
  std::size_t arena_free = 0;
  std::size_t arena_largest = 0;
  std::size_t arena_peak = 0;
  std::uint32_t arena_blocks = 0;
};

enum class ArenaChoice : std::uint8_t { Auto, Host, Cuda };

/// Many logical slots on few live sequence ids, and a parking lot for the state of those that had to make way.
///
/// Struct of arrays; every call checks its handle and the state that it leaves. All methods may be called from
/// any thread; only wait() blocks on a copy, and it does so without the lock. A call that finds no room says so
/// with an empty answer; a call that is wrong throws (StaleHandle, IllegalTransition, std::invalid_argument).
class SlotPool {
 public:
  static constexpr std::uint32_t kMaxLive = 256;  // LLAMA_MAX_SEQ
  static constexpr std::uint32_t kMaxClasses = 8;

  SlotPool(std::uint32_t slots, std::uint32_t live, std::uint32_t classes, std::size_t arena_bytes,
           ArenaChoice arena);
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;
  ~SlotPool() = default;

  // --- the life of a slot
  /// All of `n` slots, oldest handle first, or none of them.
  std::vector<Handle> reserve(std::uint32_t n, std::uint32_t klass);
  void stage(Handle handle);
  /// Give the slot the lowest free sequence id, or the one that is named; nothing when it is taken.
  std::optional<std::uint32_t> start(Handle handle, std::optional<std::uint32_t> seq = {});
  void activate(Handle handle);
  /// Back to its place in the queue; sequence id and parked state are given up, the age is kept.
  void requeue(Handle handle);
  /// True when the slot is DONE now; false when it will be as soon as its copy ends.
  bool finish(Handle handle);
  void release(Handle handle);
  /// Change the priority class: 0 goes first.
  void lift(Handle handle, std::uint32_t klass);
  /// The lowest free sequence id instead of the slot's own, if lower, or the free one that is named. The caller
  /// moves the state itself.
  std::optional<std::uint32_t> move(Handle handle, std::optional<std::uint32_t> seq = {});

  // --- who is next, who makes way
  /// The oldest waiting slot of the first class that has one (of `klass`, when given).
  std::optional<Handle> head(std::optional<std::uint32_t> klass) const;
  /// Of the live slots of a lower class than `klass`: the lowest class, there the youngest whose state (see
  /// weigh) fits the arena now.
  std::optional<Handle> victim(std::uint32_t klass) const;
  /// Bytes that the slot's state would need if parked now.
  void weigh(Handle handle, std::size_t bytes);

  // --- park and resume
  /// Copy `n` bytes into the arena: DRAINING, then PARKED when the copy is observed by poll() or wait().
  /// Nothing when the arena has no room. `from` must stay as it is until then.
  std::optional<Ticket> park(Handle handle, const void* from, std::size_t n, After after);
  /// Copy the parked bytes out: DRAINING, then what it was before it was parked. Nothing without a free
  /// sequence id. `n` must be what was parked.
  std::optional<Ticket> resume(Handle handle, void* to, std::size_t n, After after);
  /// The same without a copy of ours: the caller writes into the lent block and closes it with the bytes used
  /// (0: nothing was saved, the slot is as it was before).
  std::optional<Block> park_open(Handle handle, std::size_t n);
  void park_close(Handle handle, std::size_t used);
  /// The caller reads the lent block and closes it; `ok` false puts the slot back into its queue, to be
  /// computed again.
  std::optional<Resumed> resume_open(Handle handle, std::optional<std::uint32_t> seq = {});
  void resume_close(Handle handle, bool ok);
  /// Closes it with the slot PARKED as before: what was read was a copy, and the sequence id is free again.
  void resume_keep(Handle handle);
  /// Observe the copies that have ended: the slots that left DRAINING by it. Never blocks.
  std::vector<Handle> poll();
  /// Block until this copy has ended, then as poll().
  std::vector<Handle> wait(Ticket ticket);

  // --- looking
  [[nodiscard]] State state(Handle handle) const;
  [[nodiscard]] std::optional<std::uint32_t> seq(Handle handle) const;
  [[nodiscard]] std::uint32_t klass(Handle handle) const;
  [[nodiscard]] std::uint64_t age(Handle handle) const;
  /// Bytes parked for the slot; 0 when none.
  [[nodiscard]] std::size_t parked(Handle handle) const;
  /// Slots with a sequence id, ascending by it: the row order of a decode step.
  [[nodiscard]] std::vector<Handle> live() const;
  [[nodiscard]] std::uint32_t waiting(std::optional<std::uint32_t> klass) const;
  [[nodiscard]] Stats stats() const;
  /// Throws PoolBroken when something does not add up: free + used = total, ids, queues, arena.
  void check() const;

 private:
  using Index = std::uint32_t;
  enum class Drain : std::uint8_t { None, ParkCopy, ParkLent, ResumeCopy, ResumeLent };
  static constexpr std::int16_t kNoSeq = -1;
  static constexpr Index kNoSlot = ~Index{0};

  Index at(Handle handle) const;
  Handle handle(Index i) const { return Handle{generation_[i]} << 32 | i; }
  void want(Index i, std::initializer_list<State> from, const char* call) const;
  void want_drain(Index i, Drain drain, const char* call) const;
  void check_class(std::uint32_t klass) const;
  void enter(Index i, State state);
  void enqueue(Index i, State state);
  void dequeue(Index i);
  bool take_seq(Index i, std::optional<std::uint32_t> wanted = {});
  void give_seq(Index i);
  bool take_block(Index i, std::size_t n);
  void give_block(Index i);
  void end_drain(Index i, State state);
  void landed(Index i);
  void observe(Lane lane, std::uint64_t reached, std::vector<Handle>& settled);
  std::vector<Handle> poll_locked();
  [[nodiscard]] Block block(Index i) const { return {arena_->base() + offset_[i], saved_[i]}; }

  mutable std::mutex mutex_;
  std::uint32_t live_max_;
  std::uint64_t next_age_ = 1;

  // One element a slot.
  std::vector<std::uint32_t> generation_;
  std::vector<State> state_;
  std::vector<State> phase_;  // what a DRAINING or PARKED slot goes back to
  std::vector<Drain> drain_;
  std::vector<std::uint8_t> doomed_;  // finish() came while a copy was in flight
  std::vector<std::uint8_t> klass_;
  std::vector<std::int16_t> seq_;
  std::vector<std::uint64_t> age_;
  std::vector<std::size_t> weight_;
  std::vector<std::size_t> offset_;
  std::vector<std::size_t> saved_;  // bytes of the block; 0: none
  std::vector<std::int32_t> place_;

  std::vector<Index> free_;             // a stack
  std::vector<ClassQueue> queues_;      // one a class
  std::vector<Index> holder_;           // one a sequence id
  std::array<std::uint64_t, kMaxLive / 64> free_seqs_{};
  std::array<std::uint32_t, kStates> count_{};

  struct InFlight {
    std::uint64_t number;
    Index slot;
  };
  std::array<std::deque<InFlight>, kLanes.size()> in_flight_;
  std::array<std::uint64_t, kLanes.size()> submitted_{};

  std::uint64_t parks_ = 0;
  std::uint64_t resumes_ = 0;
  std::uint64_t requeues_ = 0;
  std::uint64_t refused_ = 0;
  std::size_t peak_ = 0;
  std::string note_;

  FreeList room_;
  std::unique_ptr<Arena> arena_;  // last: it ends its copies before the arrays go
};

}  // namespace tidemill
