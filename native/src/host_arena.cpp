#include <atomic>
#include <cstring>
#include <deque>
#include <new>
#include <thread>
#include <utility>

#include "tidemill/arena.hpp"

namespace tidemill {
namespace {

constexpr std::align_val_t kPage{4096};

/// One lane: copies in order, on a thread that the first copy starts. An engine that lends blocks instead of
/// copying never has the thread.
class Copier {
 public:
  std::uint64_t submit(void* to, const void* from, std::size_t n, After after) {
    std::uint64_t number = 0;
    {
      const std::lock_guard lock(mutex_);
      if (!thread_.joinable()) thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
      queue_.push_back({to, from, n, std::move(after.gate)});
      number = ++submitted_;
    }
    changed_.notify_all();
    return number;
  }

  [[nodiscard]] std::uint64_t reached() const { return reached_.load(std::memory_order_acquire); }

  void wait(std::uint64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached() >= number; });
  }

 private:
  struct Copy {
    void* to;
    const void* from;
    std::size_t n;
    std::shared_ptr<Gate> gate;
  };

  void run(const std::stop_token& stop) {
    for (;;) {
      Copy copy;
      {
        std::unique_lock lock(mutex_);
        if (!changed_.wait(lock, stop, [this] { return !queue_.empty(); })) return;
        copy = std::move(queue_.front());
        queue_.pop_front();
      }
      if (copy.gate && !copy.gate->wait(stop)) return;
      std::memcpy(copy.to, copy.from, copy.n);
      {
        // Under the lock, so that a waiter between its test and its sleep does not miss it.
        const std::lock_guard lock(mutex_);
        reached_.fetch_add(1, std::memory_order_release);
      }
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Copy> queue_;
  std::uint64_t submitted_ = 0;
  std::atomic<std::uint64_t> reached_ = 0;
  std::jthread thread_;  // last: it is joined before what it uses goes
};

class HostArena final : public Arena {
 public:
  explicit HostArena(std::size_t bytes)
      : bytes_(bytes),
        base_(bytes == 0 ? nullptr : static_cast<std::byte*>(::operator new(bytes, kPage))) {}

  ~HostArena() override {
    for (auto& copier : copiers_) copier.reset();
    ::operator delete(base_, kPage);
  }

  [[nodiscard]] std::byte* base() const override { return base_; }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }
  [[nodiscard]] const char* kind() const override { return "host"; }
  [[nodiscard]] bool pinned() const override { return false; }

  std::uint64_t submit(Lane lane, void* to, const void* from, std::size_t n, After after) override {
    return copier(lane).submit(to, from, n, std::move(after));
  }
  std::uint64_t reached(Lane lane) override { return copier(lane).reached(); }
  void wait(Lane lane, std::uint64_t number) override { copier(lane).wait(number); }

 private:
  Copier& copier(Lane lane) { return *copiers_[static_cast<std::size_t>(lane)]; }

  std::size_t bytes_;
  std::byte* base_;
  std::array<std::unique_ptr<Copier>, kLanes.size()> copiers_{std::make_unique<Copier>(),
                                                              std::make_unique<Copier>()};
};

}  // namespace

std::unique_ptr<Arena> make_host_arena(std::size_t bytes) { return std::make_unique<HostArena>(bytes); }

#if !defined(TIDEMILL_WITH_CUDA)
std::unique_ptr<Arena> make_cuda_arena(std::size_t, std::size_t, std::string& why) {
  why = "this build has no CUDA";
  return nullptr;
}
#endif

}  // namespace tidemill
