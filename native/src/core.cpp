// Python's view of the slot pool: tidemill.native._core.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "tidemill/slot_pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tidemill {
namespace {

/// A buffer that Python lends us, for as long as this lives.
class Buffer {
 public:
  Buffer(nb::handle object, bool writable) {
    const int flags = writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { PyBuffer_Release(&view_); }

  [[nodiscard]] void* data() const { return view_.buf; }
  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

/// A gate with an owner of its own: the copiers let go of theirs without the GIL.
struct PythonGate {
  std::shared_ptr<Gate> gate = std::make_shared<Gate>();
};

using MemoryView = nb::ndarray<nb::memview, std::uint8_t, nb::ndim<1>>;

/// The pool and the buffers of its copies in flight: those must not move or go before the copy has ended.
class Pool {
 public:
  Pool(std::uint32_t slots, std::uint32_t live, std::uint32_t classes, std::size_t arena_bytes,
       ArenaChoice arena)
      : pool_(std::make_unique<SlotPool>(slots, live, classes, arena_bytes, arena)) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() { pool_.reset(); }  // ends the copies; the buffers go after it

  SlotPool& operator*() { return *pool_; }

  std::optional<Ticket> park(Handle handle, nb::handle data, nb::object after) {
    auto buffer = std::make_unique<Buffer>(data, false);
    const auto ticket = pool_->park(handle, buffer->data(), buffer->bytes(), producer(after));
    if (ticket) lent_[handle] = std::move(buffer);
    return ticket;
  }

  std::optional<Ticket> park_at(Handle handle, std::uintptr_t address, std::size_t n, nb::object after) {
    return pool_->park(handle, reinterpret_cast<const void*>(address), n, producer(after));
  }

  std::optional<Ticket> resume(Handle handle, nb::handle out, nb::object after) {
    auto buffer = std::make_unique<Buffer>(out, true);
    const auto ticket = pool_->resume(handle, buffer->data(), buffer->bytes(), producer(after));
    if (ticket) lent_[handle] = std::move(buffer);
    return ticket;
  }

  std::optional<Ticket> resume_at(Handle handle, std::uintptr_t address, std::size_t n, nb::object after) {
    return pool_->resume(handle, reinterpret_cast<void*>(address), n, producer(after));
  }

  std::vector<Handle> poll() { return settled(pool_->poll()); }

  std::vector<Handle> wait(Ticket ticket) {
    std::vector<Handle> handles;
    {
      const nb::gil_scoped_release release;
      handles = pool_->wait(ticket);
    }
    return settled(std::move(handles));
  }

 private:
  After producer(const nb::object& after) const {
    if (after.is_none()) return {};
    if (nb::isinstance<PythonGate>(after)) return {nb::cast<const PythonGate&>(after).gate, nullptr};
    if (pool_->stats().arena_kind != "cuda") {
      throw std::invalid_argument("an event needs the CUDA arena; pass a Gate");
    }
    return {nullptr, reinterpret_cast<void*>(nb::cast<std::uintptr_t>(after))};
  }

  std::vector<Handle> settled(std::vector<Handle> handles) {
    for (const Handle handle : handles) lent_.erase(handle);
    return handles;
  }

  std::unordered_map<Handle, std::unique_ptr<Buffer>> lent_;
  std::unique_ptr<SlotPool> pool_;
};

MemoryView view(const Block& block, nb::handle owner) { return {block.data, {block.bytes}, owner}; }

nb::dict stats(Pool& pool) {
  const Stats s = (*pool).stats();
  nb::dict states;
  for (std::size_t k = 0; k < kStates; ++k) states[name(static_cast<State>(k))] = s.states[k];
  const auto free = s.states[static_cast<std::size_t>(State::Free)];
  nb::dict arena;
  arena["kind"] = s.arena_kind;
  arena["pinned"] = s.arena_pinned;
  arena["note"] = s.arena_note;
  arena["bytes"] = s.arena_bytes;
  arena["used"] = s.arena_used;
  arena["free"] = s.arena_free;
  arena["largest"] = s.arena_largest;
  arena["peak"] = s.arena_peak;
  arena["blocks"] = s.arena_blocks;
  nb::dict all;
  all["slots"] = s.slots;
  all["free"] = free;
  all["used"] = s.slots - free;
  all["states"] = states;
  all["live"] = s.live;
  all["live_max"] = s.live_max;
  all["waiting"] = s.waiting;
  all["in_flight"] = s.in_flight;
  all["parks"] = s.parks;
  all["resumes"] = s.resumes;
  all["requeues"] = s.requeues;
  all["refused"] = s.refused;
  all["arena"] = arena;
  return all;
}

ArenaChoice choice(const std::string& arena) {
  if (arena == "auto") return ArenaChoice::Auto;
  if (arena == "host") return ArenaChoice::Host;
  if (arena == "cuda") return ArenaChoice::Cuda;
  throw std::invalid_argument("arena must be auto, host or cuda, not " + arena);
}

/// The Python classes of our errors are Python's own, so that the model raises the same ones.
struct Errors {
  nb::object stale_handle;
  nb::object illegal_transition;
  nb::object pool_broken;
};

void translate(const std::exception_ptr& error, void* payload) {
  const auto* errors = static_cast<const Errors*>(payload);
  try {
    std::rethrow_exception(error);
  } catch (const StaleHandle& e) {
    PyErr_SetString(errors->stale_handle.ptr(), e.what());
  } catch (const IllegalTransition& e) {
    PyErr_SetString(errors->illegal_transition.ptr(), e.what());
  } catch (const PoolBroken& e) {
    PyErr_SetString(errors->pool_broken.ptr(), e.what());
  }
}

}  // namespace
}  // namespace tidemill

NB_MODULE(_core, m) {
  using namespace tidemill;
  m.doc() = "The slot pool in C++; tidemill.native.model is the same in Python.";

  const nb::module_ slots = nb::module_::import_("tidemill.native.slots");
  // Never freed: a translator stays registered until the interpreter goes.
  auto* errors = new Errors{slots.attr("StaleHandle"), slots.attr("IllegalTransition"), slots.attr("PoolBroken")};
  nb::register_exception_translator(translate, errors);

  m.def("built_with_cuda", [] {
#if defined(TIDEMILL_WITH_CUDA)
    return true;
#else
    return false;
#endif
  });

  nb::class_<PythonGate>(m, "Gate", "Holds a copy back until its source is ready. Opens once.")
      .def(nb::init<>())
      .def("open", [](PythonGate& self) { self.gate->open(); })
      .def_prop_ro("is_open", [](const PythonGate& self) { return self.gate->is_open(); });

  nb::class_<Pool>(m, "SlotPool", "See tidemill.native.slots.Pool.")
      .def(
          "__init__",
          [](Pool* self, std::uint32_t slots, std::uint32_t live, std::uint32_t classes, std::size_t arena_bytes,
             const std::string& arena) { new (self) Pool(slots, live, classes, arena_bytes, choice(arena)); },
          nb::kw_only(), "slots"_a = 10240, "live"_a = 16, "classes"_a = 3, "arena_bytes"_a = 0, "arena"_a = "auto")
      .def("reserve", [](Pool& p, std::uint32_t n, std::uint32_t klass) { return (*p).reserve(n, klass); }, "n"_a,
           "klass"_a)
      .def("stage", [](Pool& p, Handle h) { (*p).stage(h); }, "handle"_a)
      .def("start", [](Pool& p, Handle h, std::optional<std::uint32_t> seq) { return (*p).start(h, seq); },
           "handle"_a, "seq"_a = nb::none())
      .def("activate", [](Pool& p, Handle h) { (*p).activate(h); }, "handle"_a)
      .def("requeue", [](Pool& p, Handle h) { (*p).requeue(h); }, "handle"_a)
      .def("finish", [](Pool& p, Handle h) { return (*p).finish(h); }, "handle"_a)
      .def("release", [](Pool& p, Handle h) { (*p).release(h); }, "handle"_a)
      .def("lift", [](Pool& p, Handle h, std::uint32_t klass) { (*p).lift(h, klass); }, "handle"_a, "klass"_a)
      .def("move", [](Pool& p, Handle h, std::optional<std::uint32_t> seq) { return (*p).move(h, seq); },
           "handle"_a, "seq"_a = nb::none())
      .def("head", [](Pool& p, std::optional<std::uint32_t> klass) { return (*p).head(klass); },
           "klass"_a = nb::none())
      .def("victim", [](Pool& p, std::uint32_t klass) { return (*p).victim(klass); }, "klass"_a)
      .def("weigh", [](Pool& p, Handle h, std::size_t nbytes) { (*p).weigh(h, nbytes); }, "handle"_a, "nbytes"_a)
      .def("park", &Pool::park, "handle"_a, "data"_a, "after"_a = nb::none(),
           nb::sig("def park(self, handle: int, data: tidemill.native.slots.Buffer, after: Gate | int | None = None) -> int | None"))
      .def("park_at", &Pool::park_at, "handle"_a, "address"_a, "nbytes"_a, "after"_a = nb::none(),
           nb::sig("def park_at(self, handle: int, address: int, nbytes: int, after: Gate | int | None = None) -> "
                   "int | None"))
      .def("resume", &Pool::resume, "handle"_a, "out"_a, "after"_a = nb::none(),
           nb::sig("def resume(self, handle: int, out: tidemill.native.slots.Buffer, after: Gate | int | None = None) -> int | None"))
      .def("resume_at", &Pool::resume_at, "handle"_a, "address"_a, "nbytes"_a, "after"_a = nb::none(),
           nb::sig("def resume_at(self, handle: int, address: int, nbytes: int, after: Gate | int | None = None) -> "
                   "int | None"))
      .def(
          "park_open",
          [](nb::pointer_and_handle<Pool> self, Handle h, std::size_t nbytes) -> nb::object {
            const auto block = (**self.p).park_open(h, nbytes);
            return block ? nb::cast(view(*block, self.h)) : nb::none();
          },
          "handle"_a, "nbytes"_a, nb::sig("def park_open(self, handle: int, nbytes: int) -> memoryview | None"))
      .def("park_close", [](Pool& p, Handle h, std::size_t used) { (*p).park_close(h, used); }, "handle"_a, "used"_a)
      .def(
          "resume_open",
          [](nb::pointer_and_handle<Pool> self, Handle h, std::optional<std::uint32_t> seq) -> nb::object {
            const auto resumed = (**self.p).resume_open(h, seq);
            if (!resumed) return nb::none();
            return nb::make_tuple(resumed->seq, view(resumed->block, self.h));
          },
          "handle"_a, "seq"_a = nb::none(),
          nb::sig("def resume_open(self, handle: int, seq: int | None = None) -> tuple[int, memoryview] | None"))
      .def("resume_close", [](Pool& p, Handle h, bool ok) { (*p).resume_close(h, ok); }, "handle"_a, "ok"_a = true)
      .def("resume_keep", [](Pool& p, Handle h) { (*p).resume_keep(h); }, "handle"_a)
      .def("poll", &Pool::poll)
      .def("wait", &Pool::wait, "ticket"_a)
      .def("state", [](Pool& p, Handle h) { return static_cast<int>((*p).state(h)); }, "handle"_a)
      .def("seq", [](Pool& p, Handle h) { return (*p).seq(h); }, "handle"_a)
      .def("klass", [](Pool& p, Handle h) { return (*p).klass(h); }, "handle"_a)
      .def("age", [](Pool& p, Handle h) { return (*p).age(h); }, "handle"_a)
      .def("parked", [](Pool& p, Handle h) { return (*p).parked(h); }, "handle"_a)
      .def("live", [](Pool& p) { return (*p).live(); })
      .def("waiting", [](Pool& p, std::optional<std::uint32_t> klass) { return (*p).waiting(klass); },
           "klass"_a = nb::none())
      .def("stats", &stats, nb::sig("def stats(self) -> tidemill.native.slots.Stats"))
      .def("check", [](Pool& p) { (*p).check(); });
}
