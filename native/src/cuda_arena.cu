// Pinned host memory and two non-blocking streams. It holds no kernel: states are made and read by llama.cpp.

#include <cuda_runtime.h>

#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "tidemill/arena.hpp"

namespace tidemill {
namespace {

void ok(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();  // it is reported here and must not surface in somebody else's check
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(code));
}

template <auto Free>
struct Freed {
  template <class T>
  void operator()(T* what) const {
    (void)Free(what);
  }
};
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, Freed<cudaStreamDestroy>>;
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, Freed<cudaEventDestroy>>;
using Pinned = std::unique_ptr<void, Freed<cudaFreeHost>>;

Stream make_stream() {
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return Stream(stream);
}

Event make_event() {
  cudaEvent_t event = nullptr;
  ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return Event(event);
}

Pinned make_pinned(std::size_t bytes) {
  void* base = nullptr;
  ok(cudaHostAlloc(&base, bytes, cudaHostAllocPortable), "cudaHostAlloc");
  return Pinned(base);
}

/// One stream and a ring of events, one for each copy that may be in flight and unobserved. Copies of a stream
/// end in order, so what is in flight is a window of the ring that only moves forward:
///
///     … done | done + 1 … submitted | …
class StreamLane {
 public:
  explicit StreamLane(std::size_t in_flight) : stream_(make_stream()) {
    for (std::size_t k = 0; k < in_flight; ++k) ring_.push_back(make_event());
  }
  StreamLane(const StreamLane&) = delete;
  StreamLane& operator=(const StreamLane&) = delete;
  ~StreamLane() {
    stop_.request_stop();
    (void)cudaStreamSynchronize(stream_.get());
  }

  std::uint64_t submit(void* to, const void* from, std::size_t n, After after) {
    const std::lock_guard lock(mutex_);
    if (submitted_ - advance() >= ring_.size()) throw std::runtime_error("the ring of events is full");
    if (after.event != nullptr) {
      ok(cudaStreamWaitEvent(stream_.get(), static_cast<cudaEvent_t>(after.event), 0), "cudaStreamWaitEvent");
    }
    if (after.gate) {
      auto held = std::make_unique<Held>(Held{std::move(after.gate), stop_.get_token()});
      ok(cudaLaunchHostFunc(stream_.get(), &hold, held.get()), "cudaLaunchHostFunc");
      (void)held.release();  // the callback's, which the stream runs exactly once
    }
    ok(cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, stream_.get()), "cudaMemcpyAsync");
    ok(cudaEventRecord(event(submitted_ + 1), stream_.get()), "cudaEventRecord");
    return ++submitted_;
  }

  std::uint64_t reached() {
    const std::lock_guard lock(mutex_);
    return advance();
  }

  void wait(std::uint64_t number) {
    // The event may be recorded again for a later copy of this stream meanwhile: a longer wait, never a shorter.
    ok(cudaEventSynchronize(event(number)), "cudaEventSynchronize");
  }

 private:
  struct Held {
    std::shared_ptr<Gate> gate;
    std::stop_token stop;
  };

  static void CUDART_CB hold(void* data) {
    const std::unique_ptr<Held> held(static_cast<Held*>(data));
    held->gate->wait(held->stop);
  }

  cudaEvent_t event(std::uint64_t number) const { return ring_[number % ring_.size()].get(); }

  std::uint64_t advance() {
    while (done_ < submitted_) {
      const auto code = cudaEventQuery(event(done_ + 1));
      if (code == cudaErrorNotReady) {
        (void)cudaGetLastError();
        break;
      }
      ok(code, "cudaEventQuery");
      ++done_;
    }
    return done_;
  }

  std::mutex mutex_;
  Stream stream_;
  std::vector<Event> ring_;
  std::stop_source stop_;
  std::uint64_t submitted_ = 0;
  std::uint64_t done_ = 0;
};

class CudaArena final : public Arena {
 public:
  CudaArena(std::size_t bytes, std::size_t in_flight)
      : bytes_(bytes), base_(make_pinned(bytes)), lanes_{StreamLane(in_flight), StreamLane(in_flight)} {}

  [[nodiscard]] std::byte* base() const override { return static_cast<std::byte*>(base_.get()); }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }
  [[nodiscard]] const char* kind() const override { return "cuda"; }
  [[nodiscard]] bool pinned() const override { return true; }

  std::uint64_t submit(Lane lane, void* to, const void* from, std::size_t n, After after) override {
    return on(lane).submit(to, from, n, std::move(after));
  }
  std::uint64_t reached(Lane lane) override { return on(lane).reached(); }
  void wait(Lane lane, std::uint64_t number) override { on(lane).wait(number); }

 private:
  StreamLane& on(Lane lane) { return lanes_[static_cast<std::size_t>(lane)]; }

  std::size_t bytes_;
  Pinned base_;
  std::array<StreamLane, kLanes.size()> lanes_;  // last: they end before the memory goes
};

}  // namespace

std::unique_ptr<Arena> make_cuda_arena(std::size_t bytes, std::size_t in_flight, std::string& why) {
  int devices = 0;
  const auto code = cudaGetDeviceCount(&devices);
  if (code != cudaSuccess || devices == 0) {
    (void)cudaGetLastError();
    why = std::string("no CUDA device: ") + (code == cudaSuccess ? "none is visible" : cudaGetErrorString(code));
    return nullptr;
  }
  try {
    return std::make_unique<CudaArena>(bytes, in_flight);
  } catch (const std::runtime_error& error) {
    why = error.what();
    return nullptr;
  }
}

}  // namespace tidemill
