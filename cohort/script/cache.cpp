#include "cohort/script/cache.h"

#include <torch/nn/module.h>

#include "cohort/core/error.h"
#include "cohort/core/log.h"

namespace cohort::script {
namespace {

using core::concat;

constexpr int kMostRecordings = 5;  // state that is made lazily needs three
constexpr int kMostTries = 16;      // a forward without a backward leaves no recording

std::string difference_of(Recorded& now, const Recorded& before) {
  if (std::string found = now.tape.difference(before.tape); !found.empty()) return found;
  const bool same = now.inputs == before.inputs && now.outputs == before.outputs &&
                    now.handles == before.handles && now.split == before.split &&
                    now.has_backward == before.has_backward && now.tangents == before.tangents &&
                    now.gradients == before.gradients;
  return same ? "" : "the recordings return other tensors";
}

}  // namespace

Variant::Variant(const Environment& environment, std::span<const at::Tensor> inputs, ModuleGuard modules,
                 std::int64_t min_operators, std::string logged_as)
    : environment_(environment),
      inputs_(inputs),
      modules_(std::move(modules)),
      min_operators_(static_cast<std::size_t>(min_operators)),
      logged_as_(std::move(logged_as)) {}

std::string Variant::guards() const {
  return concat(inputs_.str(), "; ", environment_.str());
}

void Variant::settle(State state) {
  state_.store(state, std::memory_order_release);
  if (logged_as_.empty()) return;
  if (state == State::kReady) {
    core::log_info(concat("[script.", logged_as_, "] ",
                          is_short() ? "is as fast as it is: " : "replayed from now on: ",
                          program_->num_steps(), " operators, for ", guards()));
  } else if (state == State::kEager) {
    core::log_warning(concat("[script.", logged_as_, "] runs eagerly for ", guards(), ": ", reason_));
  }
}

bool Variant::holds(const Environment& environment, std::span<const at::Tensor> inputs) const {
  if (environment_ != environment || !inputs_.holds(inputs) || !modules_.holds()) return false;
  if (state() != State::kReady) return true;
  return program_->captured_hold() &&
         (!program_->recorded().tape.needs_input_storages() || inputs_.storages_hold(inputs));
}

bool Variant::is_dead() const {
  const auto& program = this->program();
  return program != nullptr && !program->captured_hold();
}

bool Variant::start_recording() {
  const std::lock_guard lock(mutex_);
  if (state() != State::kRecording) return false;
  if (++tried_ <= kMostTries) return true;
  reason_ = concat("of ", kMostTries,
                   " calls none was followed by its backward. Try: at::NoGradGuard around calls "
                   "that need no gradient");
  settle(State::kEager);
  return false;
}

void Variant::offer(Recorded recorded) {
  const std::lock_guard lock(mutex_);
  if (state() != State::kRecording) return;
  ++recorded_;
  if (!recorded.tape.refusal().empty()) {
    reason_ = recorded.tape.refusal();
    last_.reset();
    settle(State::kEager);
    return;
  }
  if (last_ != nullptr) {
    difference_ = difference_of(recorded, *last_);
    if (difference_.empty()) {
      program_ = std::make_shared<const Program>(std::move(recorded));
      last_.reset();
      settle(State::kReady);
      return;
    }
    if (recorded_ >= kMostRecordings) {
      reason_ = concat("recordings differ: ", difference_);
      last_.reset();
      settle(State::kEager);
      return;
    }
  }
  last_ = std::make_unique<Recorded>(std::move(recorded));
}

void Variant::give_up(std::string reason) {
  const std::lock_guard lock(mutex_);
  if (state() == State::kEager) return;
  reason_ = std::move(reason);
  last_.reset();
  settle(State::kEager);
}

bool Variant::is_recheck_due(std::int64_t every) {
  const std::int64_t call = calls_.fetch_add(1, std::memory_order_relaxed) + 1;
  return every > 0 && call % every == 0;
}

void Variant::recheck(Recorded recorded) {
  const auto& program = this->program();
  if (program == nullptr) return;
  std::string found = recorded.tape.refusal();
  if (found.empty()) found = difference_of(recorded, program->recorded());
  compare(found);
}

void Variant::compare(const std::string& difference) {
  if (difference.empty() || state() != State::kReady) return;
  core::log_warning(concat("[script.recheck] a program no longer does what its function does: ", difference,
                           ". The function runs eagerly from now on"));
  give_up(concat("a recheck found that ", difference));
}

std::string Variant::explain() const {
  const std::lock_guard lock(mutex_);
  std::string text = concat("  inputs: ", guards(), "\n");
  if (state() == State::kReady) {
    const Recorded& recorded = program_->recorded();
    std::size_t captured = 0;
    for (const Value& value : recorded.tape.values()) captured += value.source == Source::kCaptured ? 1 : 0;
    text += concat("    program: ", recorded.tape.calls().size(), " operators recorded, ",
                   program_->num_steps(), " run (", recorded.split, " of forward), ", captured,
                   " captured tensors, ", program_->saved().size(), " values saved for backward",
                   recorded.segments.size() > 1 ? concat(" (in ", recorded.segments.size(), " parts)") : "",
                   recorded.tape.forked().empty()
                       ? ""
                       : concat(", ", recorded.tape.forked().size(), " forked parts on other threads"),
                   "; ", calls_.load(), " calls; ", program_->num_outs(),
                   " operators write into an arena of ", program_->arena_bytes(), " bytes\n");
    if (is_short()) text += "    calls run the function itself, which is as fast as so short a program\n";
  } else if (state() == State::kEager) {
    text += concat("    eager: ", reason_, "\n");
  } else {
    text += concat("    recording: ", recorded_, " so far",
                   difference_.empty() ? "" : ", which differ: ", difference_, "\n");
  }
  return text;
}

Cache::Cache(std::string name, ScriptOptions options) : name_(std::move(name)), options_(std::move(options)) {
  if (options_.max_programs() < 1 || options_.min_operators() < 0 || options_.recheck_every() < 0 ||
      options_.gradient_chunk_bytes() < 0) {
    throw UsageError(
        "script.script",
        concat("got max_programs ", options_.max_programs(), ", min_operators ", options_.min_operators(),
               ", recheck_every ", options_.recheck_every(), " and gradient_chunk_bytes ",
               options_.gradient_chunk_bytes(), ", expected at least 1, 0, 0 and 0"));
  }
}

std::shared_ptr<Variant> Cache::find(std::span<const at::Tensor> inputs) {
  const Environment environment = Environment::now();
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < variants_.size(); ++i) {
    if (!variants_[i]->holds(environment, inputs)) continue;
    if (i > 0) std::swap(variants_[i], variants_[i - 1]);  // what is used often is found first
    return variants_[i > 0 ? i - 1 : 0];
  }
  std::erase_if(variants_, [](const auto& variant) { return variant->is_dead(); });
  if (variants_.size() < static_cast<std::size_t>(options_.max_programs())) {
    variants_.push_back(std::make_shared<Variant>(environment, inputs, ModuleGuard(options_.modules()),
                                                  options_.min_operators(), options_.log() ? name_ : ""));
    return variants_.back();
  }
  if (!full_said_) {
    full_said_ = true;
    core::log_info(concat("[script.", name_, "] has its ", options_.max_programs(),
                          " programs; calls under other guards run eagerly. explain() shows them"));
  }
  return nullptr;
}

std::string Cache::explain() const {
  const std::lock_guard lock(mutex_);
  std::string text = concat(name_, ": ", variants_.size(), " of ", options_.max_programs(), " programs\n");
  for (const auto& variant : variants_) text += variant->explain();
  if (full_said_) text += "  calls under other guards run eagerly: there are too many programs\n";
  return text;
}

std::vector<std::shared_ptr<Variant>> Cache::live_variants() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Variant>> found;
  for (const auto& variant : variants_) {
    if (variant->modules_hold() && !variant->is_dead()) found.push_back(variant);
  }
  return found;
}

void Cache::clear() {
  const std::lock_guard lock(mutex_);
  variants_.clear();
  full_said_ = false;
}

}  // namespace cohort::script
