#pragma once

#include <condition_variable>
#include <mutex>
#include <stop_token>

namespace tidemill {

/// Holds a copy back until its source is ready: the host's counterpart of an event that a producer records.
/// Opens once and stays open.
class Gate {
 public:
  void open() {
    {
      const std::lock_guard lock(mutex_);
      open_ = true;
    }
    opened_.notify_all();
  }

  [[nodiscard]] bool is_open() const {
    const std::lock_guard lock(mutex_);
    return open_;
  }

  /// True when the gate opened, false when `stop` was requested first.
  bool wait(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    return opened_.wait(lock, stop, [this] { return open_; });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable_any opened_;
  bool open_ = false;
};

}  // namespace tidemill
