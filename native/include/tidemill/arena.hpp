#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tidemill/gate.hpp"

namespace tidemill {

/// The two directions of copies. Each has a queue of its own (a stream with CUDA), in order within itself.
enum class Lane : std::uint8_t { In = 0, Out = 1 };
inline constexpr std::array kLanes{Lane::In, Lane::Out};

/// What a copy waits for before it reads its source: nothing, a gate, or (CUDA only) a recorded event.
struct After {
  std::shared_ptr<Gate> gate;
  void* event = nullptr;
};

/// One block of host memory, taken once, and the means to copy into and out of it without waiting.
/// Where inside the block something lies is not the arena's business: see FreeList.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  virtual ~Arena() = default;

  [[nodiscard]] virtual std::byte* base() const = 0;
  [[nodiscard]] virtual std::size_t bytes() const = 0;

  /// "host" or "cuda".
  [[nodiscard]] virtual const char* kind() const = 0;
  [[nodiscard]] virtual bool pinned() const = 0;

  /// Queue a copy and return its number: 1, 2, 3, … within the lane. Never blocks on the copy.
  virtual std::uint64_t submit(Lane lane, void* to, const void* from, std::size_t n, After after) = 0;

  /// The number up to which all copies of the lane are complete. Never blocks.
  virtual std::uint64_t reached(Lane lane) = 0;

  /// Block until the lane has reached `number`.
  virtual void wait(Lane lane, std::uint64_t number) = 0;
};

/// Page-aligned memory; each lane copies on a thread of its own, started by its first copy.
std::unique_ptr<Arena> make_host_arena(std::size_t bytes);

/// Pinned memory and two non-blocking streams. Null when this build has no CUDA or the machine has no
/// device; `why` then says so in one clause. `in_flight` bounds the copies of a lane that are not yet observed.
std::unique_ptr<Arena> make_cuda_arena(std::size_t bytes, std::size_t in_flight, std::string& why);

}  // namespace tidemill
