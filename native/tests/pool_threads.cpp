// Copies that are held back, and many threads on one pool.

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "must.hpp"
#include "tidemill/slot_pool.hpp"

using namespace tidemill;

namespace {

Handle active(SlotPool& pool, std::uint32_t klass) {
  const Handle h = pool.reserve(1, klass).at(0);
  pool.stage(h);
  MUST(pool.start(h).has_value());
  pool.activate(h);
  return h;
}

}  // namespace

void hold_copies_back() {
  SlotPool pool(8, 2, 3, 1 << 16, ArenaChoice::Auto);
  const Handle first = active(pool, 2);
  const Handle second = active(pool, 2);
  const std::vector<unsigned char> state(5000, 42);
  const auto gate = std::make_shared<Gate>();
  const auto a = pool.park(first, state.data(), state.size(), {gate, nullptr});
  const auto b = pool.park(second, state.data(), state.size(), {});
  MUST(a && b);
  MUST(pool.poll().empty());  // the second copy is behind the first
  MUST(pool.state(first) == State::Draining && pool.seq(first) == 0U);
  MUST_THROW(IllegalTransition, pool.requeue(first));
  MUST(!pool.finish(second));
  gate->open();
  const auto settled = pool.wait(*b);
  MUST(settled.size() == 2 && settled[0] == first && settled[1] == second);
  MUST(pool.state(first) == State::Parked && !pool.seq(first));
  MUST(pool.state(second) == State::Done);
  MUST(pool.stats().arena_blocks == 1);
  std::vector<unsigned char> back(5000, 0);
  MUST_THROW(std::invalid_argument, pool.resume(first, back.data(), 4999, {}));
  const auto c = pool.resume(first, back.data(), back.size(), {});
  MUST(c);
  MUST(pool.wait(*c).size() == 1 && back == state);
  MUST(pool.state(first) == State::Active && pool.stats().arena_used == 0);
  MUST_THROW(std::invalid_argument, pool.wait(*c + 2));
  pool.check();
}

// Every worker also looks at what the others do. A thread that did nothing but look would hold the pool's mutex most
// of the time, and where the threads outnumber the cores the others would hardly get it.
void share_the_pool_between_threads() {
  constexpr int kWorkers = 5;
  constexpr int kRounds = 20;
  SlotPool pool(64, 3, 3, 8 * 4096, ArenaChoice::Auto);
  std::atomic<int> parked = 0;
  std::vector<std::jthread> threads;
  for (int w = 0; w < kWorkers; ++w) {
    threads.emplace_back([&, w] {
      const std::vector<unsigned char> state(3000 + static_cast<std::size_t>(w), static_cast<unsigned char>(w + 1));
      std::vector<unsigned char> back(state.size());
      for (int round = 0; round < kRounds; ++round) {
        const auto group = pool.reserve(2, static_cast<std::uint32_t>(round % 3));
        MUST(group.size() == 2);
        for (const Handle h : group) {
          pool.stage(h);
          if (pool.start(h)) {
            pool.activate(h);
            const auto gate = std::make_shared<Gate>();
            const auto ticket = pool.park(h, state.data(), state.size(), {gate, nullptr});
            gate->open();
            if (ticket) {
              pool.wait(*ticket);
              MUST(pool.state(h) == State::Parked);
              ++parked;
              std::fill(back.begin(), back.end(), 0);
              if (const auto out = pool.resume(h, back.data(), back.size(), {})) {
                pool.wait(*out);
                MUST(pool.state(h) == State::Active);
                MUST(back == state);
              }
            }
          }
          MUST(pool.finish(h));
          pool.release(h);
          const auto stats = pool.stats();
          MUST(stats.arena_used + stats.arena_free == stats.arena_bytes);
          MUST(stats.live <= stats.live_max);
          pool.poll();
          MUST(pool.live().size() <= stats.live_max);
          pool.check();
        }
      }
    });
  }
  threads.clear();
  MUST(parked > 0);
  const auto stats = pool.stats();
  MUST(stats.states[static_cast<std::size_t>(State::Free)] == stats.slots);
  MUST(stats.arena_used == 0 && stats.in_flight == 0);
  pool.check();
}

void drop_a_pool_with_a_copy_held_back() {
  const std::vector<unsigned char> state(1000, 1);
  const auto gate = std::make_shared<Gate>();
  {
    SlotPool pool(4, 2, 1, 4096, ArenaChoice::Auto);
    const Handle h = active(pool, 0);
    MUST(pool.park(h, state.data(), state.size(), {gate, nullptr}).has_value());
  }
  MUST(!gate->is_open());
}
