// One entry for each set of guards. It takes recordings until two in a row are equal, and makes the program
// from the second. It stays eager if a recording has a reason against it, or after five that differ. A
// program is verified in calls 3, 4, 8, 16 and so on, and a difference ends it. A difference that other
// threads may explain counts if three come in a row. Always: program_ is written before state_ (release), so
// who reads kReady may read it without the lock. Surprising: a hit moves one place to the front, so the
// guards of most calls are compared first.
#include "cohort/script/internal/record/cache.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <bit>

#include "cohort/base/error.h"
#include "cohort/base/log.h"

namespace cohort::script {
namespace {

using base::concat;

constexpr int kMaxRecordings = 5;  // state that is made lazily needs three
constexpr int kMaxDoubts = 3;      // differences that random numbers of other threads may explain
constexpr int kMaxChanged = 3;     // recordings beside which other threads change captured tensors
constexpr int kMaxTries = 16;      // a forward without a backward leaves no recording

const char* const kCapturedChanged =
    "a captured tensor was changed during the call, and by no operator of this thread. Try: verify(false) "
    "where others train the same weights";

std::string difference_of(Trace& now, const Trace& before, bool before_is_program = false) {
  if (std::string found = now.tape.difference(before.tape, before_is_program); !found.empty()) return found;
  const bool same = now.inputs == before.inputs && now.outputs == before.outputs &&
                    now.handles == before.handles && now.split == before.split &&
                    now.has_backward == before.has_backward && now.grad_outputs == before.grad_outputs &&
                    now.gradients == before.gradients;
  return same ? "" : "the recordings return other tensors";
}

// Where its first element lies. Of a captured tensor nobody else's can lie there, as the program holds it.
const void* place_of(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::StorageImpl* const storage = impl.unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr) return nullptr;  // an undefined tensor has none either
  const auto* const begin = static_cast<const std::byte*>(storage->data());
  return begin == nullptr ? nullptr
                          : begin + impl.storage_offset() * static_cast<std::int64_t>(impl.itemsize());
}

}  // namespace

CacheEntry::CacheEntry(const Environment& environment, std::span<const at::Tensor> inputs, std::string name,
                       const ScriptOptions& options)
    : environment_(environment),
      inputs_(inputs),
      modules_(options.modules()),
      name_(std::move(name)),
      options_(options) {}

std::string CacheEntry::guards() const {
  return concat(inputs_.str(), "; ", environment_.str());
}

void CacheEntry::set_state(State state) {
  state_.store(state, std::memory_order_release);
  if (state == State::kReady && !is_short()) warn_if_unwatched();
  if (!options_.log()) return;
  if (state == State::kReady) {
    base::log_info(concat("[script.", name_, "] ",
                          is_short() ? "is as fast as it is: " : "replayed from now on: ",
                          program_->num_steps(), " operators, for ", guards()));
  } else if (state == State::kEager) {
    base::log_warning(concat("[script.", name_, "] runs eagerly for ", guards(), ": ", reason_));
  }
}

// A lambda over a model is replayed as it was recorded, after eval() too: nothing shows the flag.
void CacheEntry::warn_if_unwatched() const {
  if (modules_.watches_any()) return;
  const auto& tape = program_->trace().tape;
  const bool captures = std::ranges::any_of(tape.values(), [](const Value& value) {
    return value.source == Source::kCaptured && value.tensor.is_leaf() && value.tensor.requires_grad();
  });
  const bool draws =
      std::ranges::any_of(tape.calls(), [](const OperatorCall& call) { return call.may_draw(); });
  if (!captures && !draws) return;
  static std::atomic<bool> is_logged{false};
  if (is_logged.exchange(true)) return;
  base::log_warning(
      concat("[script.", name_, "] ", captures ? "uses parameters" : "draws random numbers",
             " and watches no module: train() and eval() do not change what is replayed. Try: "
             "ScriptOptions().modules({model.ptr()}), or script the module itself. This is logged once"));
}

bool CacheEntry::holds(const Environment& environment, std::span<const at::Tensor> inputs) const {
  // Runs before every replay, so the cheapest checks come first.
  if (environment_ != environment || !inputs_.holds(inputs) || !modules_.holds()) return false;
  if (is_retired_.load(std::memory_order_acquire)) return false;
  // Nothing is captured yet, or the function runs itself: captured tensors do not matter.
  if (state() != State::kReady || is_short()) return true;
  return (!program_->has_captured() || (program_->captures_valid() && !program_->meets_captured(inputs))) &&
         (!program_->trace().tape.needs_input_storages() || inputs_.storages_hold(inputs));
}

bool CacheEntry::is_dead() const {
  if (is_retired_.load(std::memory_order_acquire)) return true;
  const auto& program = this->program();
  return program != nullptr && !program->captures_valid();
}

bool CacheEntry::has_module_memory(std::span<const at::Tensor> inputs) const {
  const bool is_found = std::ranges::any_of(inputs, [this](const at::Tensor& input) {
    return input.defined() && input.has_storage() && modules_.has(input.storage().unsafeGetStorageImpl());
  });
  if (is_found) ++calls_with_module_memory_;
  return is_found;
}

bool CacheEntry::start_recording() {
  const std::lock_guard lock(mutex_);
  if (state() != State::kRecording) return false;
  ++tried_;
  return tried_ <= kMaxTries || std::has_single_bit(static_cast<unsigned>(tried_));
}

void CacheEntry::add_trace(Trace trace) {
  const std::lock_guard lock(mutex_);
  // Several threads may record at once, and the first two that agree have decided.
  if (state() != State::kRecording) return;
  tried_ = 0;
  if (options_.verify() && trace.tape.captured_was_changed() && ++changed_ < kMaxChanged) return;
  ++num_recordings_;
  if (changed_ == kMaxChanged) trace.tape.mark_unsupported(kCapturedChanged);
  changed_ = 0;
  if (!trace.tape.unsupported_reason().empty()) {
    reason_ = trace.tape.unsupported_reason();
    last_.reset();
    set_state(State::kEager);
    return;
  }
  if (last_ != nullptr) {
    difference_ = difference_of(trace, *last_);
    if (difference_.empty()) difference_ = difference_of_captured(trace, *last_);
    if (difference_.empty()) {
      find_same_inputs(trace, *last_);
      program_ = std::make_shared<const Program>(std::move(trace));
      last_.reset();
      set_state(State::kReady);
      return;
    }
    if (num_recordings_ >= kMaxRecordings) {
      reason_ = concat("recordings differ: ", difference_);
      last_.reset();
      set_state(State::kEager);
      return;
    }
  }
  last_ = std::make_unique<Trace>(std::move(trace));
}

void CacheEntry::mark_eager(std::string reason) {
  const std::lock_guard lock(mutex_);
  if (state() == State::kEager) return;
  reason_ = std::move(reason);
  last_.reset();
  set_state(State::kEager);
}

// A tensor that is another object in each recording, though its memory is the same, was made by no operator:
// w.data(), as a rule. Nothing shows when `w` gets other memory. A module's is guarded, and so is what the
// function also uses as it is, or was detached from.
std::string CacheEntry::difference_of_captured(const Trace& now, const Trace& before) const {
  const auto& values = now.tape.values();
  const auto& values_before = before.tape.values();
  std::vector<const Value*> unnamed(now.tape.num_storages());
  for (const Value& value : values) {
    if (value.source == Source::kCaptured) unnamed[value.storage] = &value;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].source == Source::kCaptured && count_together(values[i].tensor, values_before[i].tensor)) {
      unnamed[values[i].storage] = nullptr;
    }
  }
  for (const Value* value : unnamed) {
    if (value == nullptr || modules_.owns(value->tensor.storage().unsafeGetStorageImpl())) continue;
    return concat("a captured tensor ", value->layout.str(),
                  " is another one in each call, made by no operator, as by data(). Try: detach()");
  }
  return {};
}

void CacheEntry::find_same_inputs(const Trace& now, const Trace& before) {
  same_inputs_ = std::vector<std::atomic<const void*>>(now.input_places.size());
  for (std::size_t i = 0; i < same_inputs_.size(); ++i) {
    const void* const place = now.input_places[i];
    if (place != before.input_places[i] || place == nullptr) continue;
    same_inputs_[i] = place;
    has_same_inputs_ = true;
  }
}

// A tensor that is an input and captured too, in all recorded calls, was recorded as an input wherever the
// function reads it. With another input the program may be wrong.
bool CacheEntry::has_new_input(std::span<const at::Tensor> inputs) const {
  if (!has_same_inputs_.load(std::memory_order_relaxed)) return false;
  for (std::size_t i = 0; i < same_inputs_.size(); ++i) {
    const void* const place = same_inputs_[i].load(std::memory_order_relaxed);
    if (place != nullptr && place_of(inputs[i]) != place) return true;
  }
  return false;
}

// A recording on these inputs had the program's operators.
void CacheEntry::allow_inputs(const Trace& trace) {
  if (!has_same_inputs_.load(std::memory_order_relaxed)) return;
  bool is_left = false;
  for (std::size_t i = 0; i < same_inputs_.size(); ++i) {
    const void* const place = same_inputs_[i].load(std::memory_order_relaxed);
    if (place == nullptr) continue;
    if (trace.input_places[i] == place) {
      is_left = true;
    } else {
      same_inputs_[i].store(nullptr, std::memory_order_relaxed);
    }
  }
  if (!is_left) has_same_inputs_.store(false, std::memory_order_relaxed);
}

void CacheEntry::verify_forward(Trace& trace) {
  const auto& program = this->program();
  if (program == nullptr || !trace.tape.unsupported_reason().empty()) return;
  const std::string found = trace.tape.difference_so_far(program->trace().tape);
  found.empty() ? allow_inputs(trace) : compare(found);
}

void CacheEntry::begin(Trace& trace, std::span<const at::Tensor> inputs) const {
  for (const at::Tensor& input : inputs) {
    trace.inputs.push_back(trace.tape.add_input(input));
    trace.input_places.push_back(place_of(input));
  }
  const std::lock_guard lock(mutex_);
  const Trace* const known = program_ != nullptr ? &program_->trace() : last_.get();
  if (known == nullptr) return;
  // Before the function runs: a write before the first operator that reads the tensor counts too.
  for (const Value& value : known->tape.values()) {
    if (value.source == Source::kCaptured) trace.tape.watch(value.tensor);
  }
}

bool CacheEntry::is_verification_due(std::span<const at::Tensor> inputs) {
  const std::int64_t replay = calls_.fetch_add(1, std::memory_order_relaxed) + 1;
  // Powers of two: a program that has held for long is verified ever more rarely.
  const std::int64_t call = replay + 2;  // after the two that were recorded
  const std::int64_t every = options_.verify_every();
  const bool has_new = options_.verify() && has_new_input(inputs);
  return (options_.verify() && (call == 3 || (call & (call - 1)) == 0)) || has_new ||
         (every > 0 && replay % every == 0);
}

void CacheEntry::verify(Trace trace) {
  const auto& program = this->program();
  if (program == nullptr) return;
  std::string found = trace.tape.unsupported_reason();
  if (found.empty()) found = difference_of(trace, program->trace(), /*before_is_program=*/true);
  if (found.empty()) found = difference_of_captured(trace, program->trace());
  if (found.empty()) allow_inputs(trace);
  const bool was_changed = trace.tape.captured_was_changed();
  if (found.empty() && was_changed && options_.verify()) found = kCapturedChanged;
  if (!found.empty()) compare(found, /*is_alone=*/!was_changed);
}

void CacheEntry::compare(const std::string& difference, bool is_alone) {
  // Only a call that no other thread disturbed shows that earlier doubts were none.
  if (is_alone && difference.empty()) doubts_ = 0;
  if (difference.empty() || state() != State::kReady) return;
  if (!is_alone && ++doubts_ < kMaxDoubts) return;
  base::log_warning(concat("[script.verify] a program no longer does what its function does: ", difference,
                           is_alone ? ""
                                    : ". The function sets a seed, or other threads draw from its generator "
                                      "(try core::RandomScope) or change its captured tensors (try "
                                      "verify(false))",
                           ". The function runs eagerly from now on"));
  mark_eager(concat("a verification found that ", difference));
}

std::string CacheEntry::explain() const {
  const std::lock_guard lock(mutex_);
  std::string text = concat("  inputs: ", guards(), "\n");
  if (state() == State::kReady) {
    const Trace& trace = program_->trace();
    std::size_t captured = 0;
    for (const Value& value : trace.tape.values()) captured += value.source == Source::kCaptured ? 1 : 0;
    const std::size_t recorded_calls = trace.tape.calls().size();
    const bool has_backward = trace.split < recorded_calls;  // of its own: a whole step has one tape
    const std::int64_t calls = calls_.load();
    text += concat("    program: ", recorded_calls, " operators recorded",
                   has_backward ? concat(" (", trace.split, " of forward)") : "", ", ", program_->num_steps(),
                   " run, ", captured, " captured tensors",
                   has_backward ? concat(", ", program_->saved().size(), " values saved for backward") : "",
                   trace.segments.size() > 1 ? concat(" (in ", trace.segments.size(), " parts)") : "",
                   trace.tape.forked().empty()
                       ? ""
                       : concat(", ", trace.tape.forked().size(), " forked parts on other threads"),
                   "; ", calls, calls == 1 ? " call" : " calls", "; ", program_->num_outs(),
                   " operators write into an arena of ", program_->arena_bytes(), " bytes\n");
    if (is_short()) text += "    calls run the function itself, which is as fast as so short a program\n";
  } else if (state() == State::kEager) {
    text += concat("    eager: ", reason_, "\n");
  } else {
    text += concat("    recording: ", num_recordings_, " so far",
                   difference_.empty() ? "" : ", which differ: ", difference_, "\n");
    if (tried_ > kMaxTries) {
      text += concat(
          "    of ", tried_, " calls none could be used: no backward followed, or its gradient was an ",
          "expanded one, which others cannot take the place of. Try: at::NoGradGuard around calls that ",
          "need no gradient\n");
    }
  }
  if (const std::int64_t calls = calls_with_module_memory_; calls > 0) {
    text += concat("    ", calls, calls == 1 ? " call" : " calls", " ran the function itself: an input is a ",
                   "parameter or buffer of a watched module. Try: its clone()\n");
  }
  return text;
}

Cache::Cache(std::string name, ScriptOptions options) : name_(std::move(name)), options_(std::move(options)) {
  if (options_.max_programs() < 1 || options_.min_operators() < 0 || options_.verify_every() < 0 ||
      options_.gradient_chunk_bytes() < 0) {
    throw UsageError(
        "script.script",
        concat("got max_programs ", options_.max_programs(), ", min_operators ", options_.min_operators(),
               ", verify_every ", options_.verify_every(), " and gradient_chunk_bytes ",
               options_.gradient_chunk_bytes(), ", expected at least 1, 0, 0 and 0"));
  }
}

std::shared_ptr<CacheEntry> Cache::find(std::span<const at::Tensor> inputs) {
  const Environment environment = Environment::now();
  const std::lock_guard lock(mutex_);
  ++calls_;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i].entry->holds(environment, inputs)) continue;
    entries_[i].last_call = calls_;
    if (i == 0) return entries_[0].entry;
    std::swap(entries_[i], entries_[i - 1]);  // what is used often is found first
    return entries_[i - 1].entry;
  }
  // A parameter that got other memory leaves a dead entry, which must not fill max_programs.
  std::erase_if(entries_, [](const LruEntry& lru) { return lru.entry->is_dead(); });
  if (entries_.size() >= static_cast<std::size_t>(options_.max_programs())) {
    const auto oldest = std::ranges::min_element(entries_, {}, &LruEntry::last_call);
    // A used entry stays: programs that take turns would else be recorded anew each time.
    if (calls_ - oldest->last_call > kStaleCalls) entries_.erase(oldest);
  }
  if (entries_.size() < static_cast<std::size_t>(options_.max_programs())) {
    entries_.push_back({std::make_shared<CacheEntry>(environment, inputs, name_, options_), calls_});
    return entries_.back().entry;
  }
  if (!was_full_) {
    was_full_ = true;
    base::log_info(concat("[script.", name_, "] has its ", options_.max_programs(),
                          " programs; calls under other guards run eagerly. explain() shows them"));
  }
  return nullptr;
}

std::string Cache::explain() const {
  const std::lock_guard lock(mutex_);
  std::string text = concat(name_, ": ", entries_.size(), " of ", options_.max_programs(), " programs\n");
  for (const LruEntry& lru : entries_) text += lru.entry->explain();
  if (was_full_) text += "  calls under other guards run eagerly: there are too many programs\n";
  return text;
}

std::vector<std::shared_ptr<CacheEntry>> Cache::live_entries() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<CacheEntry>> found;
  for (const LruEntry& lru : entries_) {
    if (lru.entry->modules_hold() && !lru.entry->is_dead()) found.push_back(lru.entry);
  }
  return found;
}

void Cache::clear() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
  was_full_ = false;
}

}  // namespace cohort::script
