#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace tidemill {

/// A few threads that share a loop. The caller works too, so that one thread means no other thread at all.
class Workers {
 public:
  /// `threads` in all, the caller's included; at least 1.
  explicit Workers(std::size_t threads) {
    if (threads == 0) throw std::invalid_argument("there must be at least one thread");
    for (std::size_t k = 1; k < threads; ++k) {
      threads_.emplace_back([this](const std::stop_token& stop) { help(stop); });
    }
  }

  /// Call `work(0)` … `work(n - 1)`, each once, in any order and on any of the threads; returns when all have
  /// ended. The first exception is thrown again here. One caller at a time.
  void each(std::size_t n, const std::function<void(std::size_t)>& work) {
    if (n == 0) return;
    if (threads_.empty() || n == 1) {
      for (std::size_t k = 0; k < n; ++k) work(k);
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      work_ = &work;
      n_ = n;
      next_ = 0;
      failure_ = nullptr;
      helping_ = threads_.size();
      ++round_;
    }
    begin_.notify_all();
    take();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return helping_ == 0; });
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  void help(const std::stop_token& stop) {
    std::size_t seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        if (!begin_.wait(lock, stop, [&] { return round_ != seen; })) return;
        seen = round_;
      }
      take();
      {
        const std::lock_guard lock(mutex_);
        --helping_;
      }
      done_.notify_one();
    }
  }

  void take() {
    for (std::size_t k = next_.fetch_add(1); k < n_; k = next_.fetch_add(1)) {
      try {
        (*work_)(k);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!failure_) failure_ = std::current_exception();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable_any begin_;
  std::condition_variable done_;
  const std::function<void(std::size_t)>* work_ = nullptr;
  std::size_t n_ = 0;
  std::size_t round_ = 0;
  std::size_t helping_ = 0;
  std::atomic<std::size_t> next_ = 0;
  std::exception_ptr failure_;
  std::vector<std::jthread> threads_;  // last: they end before what they use goes
};

}  // namespace tidemill
