// Random walks on one thread: the free list against a map of units, the pool against its own check().

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "must.hpp"
#include "tidemill/slot_pool.hpp"

using namespace tidemill;

void walk_the_free_list() {
  constexpr std::size_t kUnits = 64;
  FreeList list(kUnits * FreeList::kAlign + 17);
  MUST(list.total() == kUnits * FreeList::kAlign);
  std::vector<bool> taken(kUnits, false);
  struct Held {
    std::size_t offset;
    std::size_t n;
  };
  std::vector<Held> held;
  std::mt19937 random(1);
  const auto mark = [&](std::size_t offset, std::size_t n, bool value) {
    for (std::size_t u = offset / FreeList::kAlign; u < (offset + FreeList::rounded(n)) / FreeList::kAlign; ++u) {
      MUST(taken[u] != value);
      taken[u] = value;
    }
  };
  for (int step = 0; step < 4'000; ++step) {
    const auto dice = random() % 8;
    if (dice < 4) {
      const std::size_t n = 1 + random() % (12 * FreeList::kAlign);
      const auto offset = list.take(n);
      std::size_t run = 0;
      std::size_t longest = 0;
      for (const bool used : taken) {
        run = used ? 0 : run + 1;
        longest = std::max(longest, run);
      }
      MUST(offset.has_value() == (FreeList::rounded(n) <= longest * FreeList::kAlign));
      if (offset) {
        mark(*offset, n, true);
        held.push_back({*offset, n});
      }
    } else if (!held.empty()) {
      const std::size_t k = random() % held.size();
      if (dice == 7) {
        const std::size_t to = 1 + random() % held[k].n;
        list.shrink(held[k].offset, held[k].n, to);
        const std::size_t cut = held[k].offset + FreeList::rounded(to);
        const std::size_t end = held[k].offset + FreeList::rounded(held[k].n);
        if (end > cut) mark(cut, end - cut, false);
        held[k].n = to;
      } else {
        list.give(held[k].offset, held[k].n);
        mark(held[k].offset, held[k].n, false);
        held[k] = held.back();
        held.pop_back();
      }
    }
    const auto free_units = static_cast<std::size_t>(std::count(taken.begin(), taken.end(), false));
    MUST(list.free() == free_units * FreeList::kAlign);
  }
  for (const Held& h : held) list.give(h.offset, h.n);
  MUST(list.holes().size() == 1 && list.largest() == list.total());
}

void walk_the_pool() {
  SlotPool pool(40, 6, 3, 64 * FreeList::kAlign, ArenaChoice::Host);
  std::mt19937 random(2);
  std::vector<Handle> all;
  std::vector<unsigned char> bytes(16 * FreeList::kAlign, 7);
  const auto in = [&](State state) {
    std::vector<Handle> some;
    for (const Handle h : all) {
      if (pool.state(h) == state) some.push_back(h);
    }
    return some;
  };
  const auto one = [&](const std::vector<Handle>& some) { return some[random() % some.size()]; };
  for (int step = 0; step < 4'000; ++step) {
    switch (random() % 12) {
      case 0: {
        const auto n = 1 + static_cast<std::uint32_t>(random() % 4);
        const auto group = pool.reserve(n, static_cast<std::uint32_t>(random() % 3));
        MUST(group.empty() || group.size() == n);
        all.insert(all.end(), group.begin(), group.end());
        break;
      }
      case 1:
        for (const Handle h : in(State::Reserved)) pool.stage(h);
        break;
      case 2:
      case 3:
        if (const auto h = pool.head(std::nullopt)) {
          if (pool.state(*h) == State::Staged) {
            pool.start(*h);
          } else if (const auto resumed = pool.resume_open(*h)) {
            for (std::size_t k = 0; k < resumed->block.bytes; ++k) {
              MUST(resumed->block.data[k] == static_cast<std::byte>(*h));
            }
            pool.resume_close(*h, random() % 8 != 0);
          }
        }
        break;
      case 4:
        for (const Handle h : in(State::Prefill)) {
          pool.weigh(h, random() % bytes.size());
          pool.activate(h);
        }
        break;
      case 5:
      case 6:
        if (const auto h = pool.victim(static_cast<std::uint32_t>(random() % 2))) {
          const std::size_t n = 1 + random() % bytes.size();
          if (const auto block = pool.park_open(*h, n)) {
            const std::size_t used = random() % (n + 1);
            std::memset(block->data, static_cast<int>(*h & 0xff), n);
            pool.park_close(*h, used);
            MUST(pool.parked(*h) == used);
          }
        }
        break;
      case 7:
        if (const auto some = in(State::Active); !some.empty()) pool.requeue(one(some));
        break;
      case 8:
        if (!all.empty()) {
          const Handle h = one(all);
          if (pool.state(h) != State::Done) {
            MUST(pool.finish(h));
          } else {
            MUST_THROW(IllegalTransition, pool.finish(h));
          }
        }
        break;
      case 9:
        for (const Handle h : in(State::Done)) {
          pool.release(h);
          MUST_THROW(StaleHandle, (void)pool.state(h));
          all.erase(std::find(all.begin(), all.end(), h));
        }
        break;
      case 10:
        if (const auto some = in(State::Staged); !some.empty()) {
          pool.lift(one(some), static_cast<std::uint32_t>(random() % 3));
        }
        break;
      default:
        if (const auto some = pool.live(); !some.empty()) {
          const Handle h = one(some);
          const auto before = *pool.seq(h);
          if (const auto after = pool.move(h)) MUST(*after < before && *pool.seq(h) == *after);
        }
    }
    pool.check();
  }
}
