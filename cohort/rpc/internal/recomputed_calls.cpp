// A recompute() runs a function twice: in the program, or a handler, and in the backward of its graph. Each
// run gets scopes of its own for the context and for seeds, which begin at the same numbers. So a call of the
// second run has the path and the seed of the first run's: gradients are added in the same order, and
// handlers draw the same numbers.
//
// The graph of the first run is dropped, and with it its calls: they send no gradients. Those of the second
// run go backward within it. So an object that the function makes goes backward there, after all its users
// (Note [Late calls]), and must not be used elsewhere: its call would have no backward, which the root's
// backward says.
//
// Without a key of the context handlers draw from their process's generator, which has moved when the second
// run comes. So the calls get seeds in any case.
//
// Always: after the first run the thread's numbers are those that a plain call leaves, also where the
// function throws.
#include "cohort/rpc/internal/recomputed_calls.h"

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/random.h"
#include "cohort/core/random_scope.h"
#include "cohort/rpc/internal/backward_failures.h"
#include "cohort/rpc/internal/context_scope.h"

namespace cohort::rpc {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// For calls that have none of their own: of the program's seed and of the place in the context. Calls that
// are not recorded have no number there, so two recompute() may begin at one number of a call.
std::uint64_t seed_of_place(ContextScope& scope) {
  at::Generator generator = core::RandomScope::current();
  if (!generator.defined()) generator = core::RandomScope::global();
  std::uint64_t seed = 0;
  {
    const std::lock_guard lock(generator.mutex());
    seed = generator.current_seed();
  }
  const dist_autograd::ContextId id = scope.context()->id();
  const auto mix = [&](std::uint64_t a, std::uint64_t b) {
    seed = base::RandomStream(seed, a, b, base::Purpose::kPart).next_u64();
  };
  mix(static_cast<std::uint64_t>(id.creator), id.number);
  for (const std::uint32_t number : scope.path()) mix(0, number);
  mix(1, scope.num_calls());
  mix(2, scope.next_recompute());
  return seed;
}

class CallsOfRun : public autograd::RunScope {
 public:
  explicit CallsOfRun(std::optional<std::uint64_t> seed, std::uint64_t first_seed)
      : seeds_(seed, first_seed) {}
  /// The thread that goes backward may have a context of its own.
  void hide_context() { no_context_.emplace(); }
  /// Threads of the engine go no backward of their own: nodes of a backward deep within others run there.
  void begin_backward(const ContextState& context) {
    if (BackwardScope::current() != nullptr || context.num_running() == 0) return;
    backward_.emplace(context.failures(), context.current_backward().number);
  }
  void begin_context(std::shared_ptr<ContextState> context, CallPath path, std::vector<at::Tensor> inputs,
                     std::uint32_t first_call) {
    scope_.emplace(std::move(context), std::move(path), std::move(inputs), first_call);
  }
  std::vector<at::Tensor> end() override { return scope_ ? scope_->late() : std::vector<at::Tensor>(); }

  std::uint32_t num_calls() const { return scope_ ? scope_->num_calls() : 0; }
  std::uint64_t num_seeds() const { return seeds_.num_calls(); }

 private:
  const SeedScope seeds_;
  std::optional<NoContextScope> no_context_;
  std::optional<BackwardScope> backward_;
  std::optional<ContextScope> scope_;
};

// Advances the numbers of the thread at its end.
class CallsOfFirstRun : public autograd::RunScope {
 public:
  CallsOfFirstRun(std::unique_ptr<CallsOfRun> calls, bool& has_calls)
      : calls_(std::move(calls)), has_calls_(has_calls) {}
  ~CallsOfFirstRun() override {
    const std::uint32_t num_calls = calls_->num_calls();
    const std::uint64_t num_seeds = calls_->num_seeds();
    calls_ = nullptr;
    if (ContextScope* const scope = ContextScope::current()) {
      has_calls_ = num_calls != scope->num_calls();
      scope->skip_to(num_calls);
    }
    if (SeedScope* const seeds = SeedScope::current()) seeds->skip_to(num_seeds);
  }
  CallsOfFirstRun(const CallsOfFirstRun&) = delete;
  CallsOfFirstRun& operator=(const CallsOfFirstRun&) = delete;
  std::vector<at::Tensor> end() override { return calls_->end(); }

 private:
  std::unique_ptr<CallsOfRun> calls_;
  bool& has_calls_;
};

class StateOfCalls : public autograd::RunState {
 public:
  StateOfCalls() {
    if (const ContextScope* const scope = ContextScope::current()) {
      context_ = scope->context();
      path_ = scope->path();
      first_call_ = scope->num_calls();
      for (const at::Tensor& input : scope->inputs()) inputs_.emplace_back(input.getIntrusivePtr());
    }
    if (const SeedScope* const seeds = SeedScope::current()) {
      seed_ = seeds->seed();
      first_seed_ = seeds->num_calls();
    }
    if (ContextScope* const scope = ContextScope::current(); scope != nullptr && !seed_) {
      seed_ = seed_of_place(*scope);
      first_seed_ = 0;
    }
  }

  std::unique_ptr<autograd::RunScope> begin_first_run(const std::vector<at::Tensor>& inputs) override {
    auto calls = std::make_unique<CallsOfRun>(seed_, first_seed_);
    begin_context(*calls, context_.lock(), inputs);
    return std::make_unique<CallsOfFirstRun>(std::move(calls), has_calls_);
  }
  std::unique_ptr<autograd::RunScope> begin_second_run(const std::vector<at::Tensor>& inputs) override {
    std::shared_ptr<ContextState> context = context_.lock();
    if (has_calls_ && (context == nullptr || context->has_ended())) {
      throw UsageError("rpc.context",
                       "autograd::recompute() is to make a remote call once more, and the context in which "
                       "it made the call has ended",
                       "backward() before the context ends");
    }
    auto calls = std::make_unique<CallsOfRun>(seed_, first_seed_);
    calls->hide_context();
    if (context != nullptr) calls->begin_backward(*context);
    begin_context(*calls, std::move(context), inputs);
    return calls;
  }

 private:
  // `context` is null where the function runs outside of contexts.
  void begin_context(CallsOfRun& calls, std::shared_ptr<ContextState> context,
                     const std::vector<at::Tensor>& inputs) const {
    if (context == nullptr) return;
    // The function's, and the handler's, which it may capture.
    std::vector<at::Tensor> all = inputs;
    for (const WeakTensor& input : inputs_) {
      if (auto tensor = input.lock()) all.emplace_back(std::move(tensor));
    }
    calls.begin_context(std::move(context), path_, std::move(all), first_call_);
  }

  bool has_calls_ = false;  // recorded ones
  // Weakly: the context has the graph, and the graph has this.
  std::weak_ptr<ContextState> context_;
  CallPath path_;
  std::vector<WeakTensor> inputs_;
  std::uint32_t first_call_ = 0;
  std::optional<std::uint64_t> seed_;
  std::uint64_t first_seed_ = 0;
};

}  // namespace

std::unique_ptr<autograd::RunState> take_state_of_calls() {
  return std::make_unique<StateOfCalls>();
}

}  // namespace cohort::rpc
