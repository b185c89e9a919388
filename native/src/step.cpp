// One step of llama.cpp for all sequences, without the GIL: tidemill.native._step.

#include <llama.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "tidemill/choice.hpp"
#include "tidemill/ggml_device.hpp"
#include "tidemill/workers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tidemill {
namespace {

/// A llama_batch over memory that is taken once.
class Batch {
 public:
  explicit Batch(std::size_t rows)
      : token_(rows), pos_(rows), seq_(rows), seqs_(rows), n_seq_(rows, 1), output_(rows) {
    for (std::size_t k = 0; k < rows; ++k) seqs_[k] = &seq_[k];
  }

  [[nodiscard]] std::size_t room() const { return token_.size(); }
  [[nodiscard]] std::size_t rows() const { return rows_; }
  void clear() { rows_ = 0; }

  void add(llama_token token, llama_pos pos, llama_seq_id seq) {
    token_[rows_] = token;
    pos_[rows_] = pos;
    seq_[rows_] = seq;
    output_[rows_] = 0;
    ++rows_;
  }
  void want_last(std::size_t n) { std::fill_n(output_.begin() + static_cast<std::ptrdiff_t>(rows_ - n), n, 1); }

  llama_batch get() {
    return {static_cast<std::int32_t>(rows_), token_.data(), nullptr,       pos_.data(),
            n_seq_.data(),                    seqs_.data(),  output_.data()};
  }

 private:
  std::size_t rows_ = 0;
  std::vector<llama_token> token_;
  std::vector<llama_pos> pos_;
  std::vector<llama_seq_id> seq_;
  std::vector<llama_seq_id*> seqs_;
  std::vector<std::int32_t> n_seq_;
  std::vector<std::int8_t> output_;
};

llama_sampler* sampler(std::uintptr_t address) { return reinterpret_cast<llama_sampler*>(address); }

class Step {
 public:
  Step(std::uintptr_t context, std::size_t threads)
      : context_(existing(context)), batch_(llama_n_batch(context_)), workers_(threads) {
    vocab_ = llama_model_get_vocab(llama_get_model(context_));
    llama_set_abort_callback(context_, [](void* step) { return static_cast<Step*>(step)->stop_.load(); }, this);
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  void interrupt() { stop_ = true; }

  nb::tuple run(const nb::list& chunks) {
    read(chunks);
    stop_ = false;  // it was meant for an earlier step
    int rc = 0;
    {
      const nb::gil_scoped_release release;
      rc = llama_decode(context_, batch_.get());
      if (rc == 0) sample();
    }
    nb::list answer;
    if (rc == 0) {
      for (const Asked& asked : asked_) {
        nb::list chosen;
        for (const Chosen& c : asked.chosen) chosen.append(nb::make_tuple(c.token, c.end, c.logprob, c.top));
        answer.append(chosen);
      }
    }
    return nb::make_tuple(rc, answer);
  }

 private:
  /// What a chunk with a choice asks for, and gets.
  struct Asked {
    Choice choice;
    std::size_t row;  ///< its first row of output; one more for each draft
    std::vector<llama_token> drafts;
    std::vector<Chosen> chosen;
  };

  static llama_context* existing(std::uintptr_t address) {
    if (address == 0) throw std::invalid_argument("there is no context at address 0");
    return reinterpret_cast<llama_context*>(address);
  }

  void read(const nb::list& chunks) {
    batch_.clear();
    asked_.clear();
    std::size_t outputs = 0;
    for (const nb::handle item : chunks) {
      const auto chunk = nb::cast<nb::tuple>(item);
      if (chunk.size() != 5) throw std::invalid_argument("a chunk is (seq, start, tokens, drafts, choice)");
      const auto seq = nb::cast<llama_seq_id>(chunk[0]);
      auto pos = nb::cast<llama_pos>(chunk[1]);
      const auto tokens = nb::cast<nb::list>(chunk[2]);
      auto drafts = nb::cast<std::vector<llama_token>>(chunk[3]);
      if (tokens.size() == 0) throw std::invalid_argument("a chunk has at least one token");
      if (!drafts.empty() && chunk[4].is_none()) throw std::invalid_argument("drafts need a choice");
      if (tokens.size() + drafts.size() > batch_.room() - batch_.rows()) {
        // llama.cpp asserts this, and its assertions end the process.
        throw std::invalid_argument("more rows than the context's batch has room for");
      }
      for (const nb::handle token : tokens) batch_.add(nb::cast<llama_token>(token), pos++, seq);
      for (const llama_token draft : drafts) batch_.add(draft, pos++, seq);
      if (!chunk[4].is_none()) {
        const std::size_t rows = 1 + drafts.size();
        batch_.want_last(rows);
        asked_.push_back({nb::cast<const Choice&>(chunk[4]), outputs, std::move(drafts), {}});
        outputs += rows;
      }
    }
    if (batch_.rows() == 0) throw std::invalid_argument("a step has at least one row");
  }

  void sample() {
    if (asked_.empty()) return;
    // Rows of output in batch order; valid until the next decode.
    const float* logits = llama_get_logits(context_);
    const auto n_vocab = static_cast<std::size_t>(llama_vocab_n_tokens(vocab_));
    workers_.each(asked_.size(), [&](std::size_t k) {
      Asked& asked = asked_[k];
      asked.chosen = choose_on(asked.choice, asked.drafts, logits + asked.row * n_vocab, vocab_);
    });
  }

  llama_context* context_;
  const llama_vocab* vocab_ = nullptr;
  std::atomic<bool> stop_ = false;
  Batch batch_;
  std::vector<Asked> asked_;
  Workers workers_;
};

nb::dict sizes() {
  nb::dict all;
  all["llama_context_params"] = sizeof(llama_context_params);
  all["llama_model_params"] = sizeof(llama_model_params);
  all["llama_batch"] = sizeof(llama_batch);
  all["llama_token_data"] = sizeof(llama_token_data);
  all["llama_token_data_array"] = sizeof(llama_token_data_array);
  return all;
}

}  // namespace
}  // namespace tidemill

NB_MODULE(_step, m) {
  using namespace tidemill;
  m.doc() = "One step of llama.cpp without the GIL; use it through tidemill.native.step.";
  m.def("version", [] { return TIDEMILL_LLAMA_CPP; }, "The llama-cpp-python that this was built against.");
  m.def("sizes", &sizes, nb::sig("def sizes() -> dict[str, int]"), "Bytes of the structs that cross the interface.");

  m.def("offer_attention", &offer_attention,
        "Let contexts that are made from now on compute attention here; why they cannot, or nothing.");
  m.def(
      "share",
      [](const std::vector<std::pair<std::int32_t, std::int32_t>>& all) {
        std::vector<Beginning> beginnings;
        beginnings.reserve(all.size());
        for (const auto& [group, length] : all) beginnings.push_back({group, length});
        share(std::move(beginnings));
      },
      "beginnings"_a, nb::sig("def share(beginnings: list[tuple[int, int]]) -> None"),
      "(group, length) by sequence id of the context that computes next: how many first tokens are the\n"
      "same in memory as those of others of the group; a group below 0 is none.");

  nb::class_<Choice>(m, "Choice", "How the next token of one sequence is chosen.")
      .def(
          "__init__",
          [](Choice* self, std::uintptr_t chain, std::uintptr_t grammar, std::optional<std::size_t> top) {
            new (self) Choice{sampler(chain), sampler(grammar), top};
          },
          nb::kw_only(), "chain"_a = 0, "grammar"_a = 0, "top"_a = nb::none(),
          "Addresses of samplers (0: none) that outlive this; ``top`` as Generation.logprobs.");

  nb::class_<Step>(m, "Step", "Steps of one llama.cpp context; used by one thread, but for ``interrupt``.")
      .def(nb::init<std::uintptr_t, std::size_t>(), "context"_a, "threads"_a = 1,
           "``context``: the address of a llama_context that outlives this.")
      .def("interrupt", &Step::interrupt, "Let the run that is at work return 2, at its next operation on a CPU.")
      .def("run", &Step::run, "chunks"_a,
           nb::sig("def run(self, chunks: list[tuple[int, int, list[int], list[int], Choice | None]]) -> "
                   "tuple[int, list[list[tuple[int, bool, float | None, list[tuple[int, float]]]]]]"),
           "(seq, start, tokens, drafts, choice) to rc and, by choice, [(token, end, logprob, top)].");
}
