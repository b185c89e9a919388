// Threads that share a loop.

#include <atomic>
#include <stdexcept>
#include <vector>

#include "must.hpp"
#include "tidemill/workers.hpp"

using namespace tidemill;

void share_a_loop() {
  for (const std::size_t threads : {1U, 2U, 5U}) {
    Workers workers(threads);
    for (std::size_t n = 0; n < 60; ++n) {
      std::vector<int> done(n, 0);  // no atomic: each element has one writer, and each() orders it before us
      workers.each(n, [&](std::size_t k) { ++done[k]; });
      for (const int times : done) MUST(times == 1);
    }
    std::atomic<int> ran = 0;
    MUST_THROW(std::runtime_error, workers.each(40, [&](std::size_t k) {
      if (k == 7) throw std::runtime_error("seven");
      ++ran;
    }));
    MUST(ran == (threads == 1 ? 7 : 39));
    workers.each(3, [&](std::size_t) { ++ran; });
    MUST(ran == (threads == 1 ? 10 : 42));
  }
  MUST_THROW(std::invalid_argument, Workers(0));
}
