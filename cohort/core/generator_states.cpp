// States are taken as clones of the generators. A second run draws from copies of these, through a
// RandomScope, so no other thread sees it. Where a copy does not do, the global generator itself is set for
// the time of the run, by one thread at a time. Always: the generators that were set are restored when the
// run ends. A count of lendings tells a change that the function made from a state that another thread has
// lent meanwhile.
#include "cohort/core/generator_states.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"

namespace cohort::core {
namespace {

at::Generator copy_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.clone();
}

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state_of(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

// Who has lent the global generator a state. The mutex is held for moments, never while a function runs; what
// a thread reads of the generator under it is no state that is being lent.
struct Lender {
  std::mutex mutex;  // of what follows
  std::condition_variable changed;
  std::thread::id thread;  // that has it, where depth > 0
  int depth = 0;
  std::int64_t times = 0;

  // Waits until no other thread has lent it.
  void wait_until_free(std::unique_lock<std::mutex>& lock, base::Deadline::Clock::duration patience) {
    const auto is_free = [this] { return depth == 0 || thread == std::this_thread::get_id(); };
    const base::Deadline deadline(patience);
    if (base::wait(changed, lock, is_free, deadline)) return;
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.elapsed()).count();
    throw TimeoutError(
        "core.generator_states",
        base::concat("waited ", waited,
                     " ms for LibTorch's global generator, which another thread's function has "
                     "while it runs a second time"),
        "core::RandomScope around one of the calls, and no function that waits for another "
        "thread's");
  }
};

Lender& lender() {
  static Lender& instance = *new Lender;  // leaked: threads may outlive statics
  return instance;
}
thread_local std::int64_t times_lent_here = 0;

// How often other threads have lent it. Under the lender's mutex.
std::int64_t lent_elsewhere() {
  return lender().times - times_lent_here;
}

// Without an operator, which may not be called under a mutex.
bool are_same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

}  // namespace

std::vector<at::Generator> generators_of_gpus(const std::vector<c10::Device>& devices) {
  std::vector<at::Generator> generators;
  for (const c10::Device device : devices) {
    if (device.is_cuda()) generators.push_back(at::globalContext().defaultGenerator(device));
  }
  return generators;
}

GeneratorStates::GeneratorStates(const std::vector<at::Generator>& generators) : is_taken_(true) {
  const at::Generator scope = RandomScope::current(), global = RandomScope::global();
  global_ = copy_of(global);
  // One generator stays one.
  if (scope.defined() && scope != global) scope_ = copy_of(scope);
  for (const at::Generator& other : generators) {
    const auto is_other = [&](const auto& each) { return each.first == other; };
    if (other == at::detail::getDefaultCPUGenerator() || std::ranges::any_of(others_, is_other)) continue;
    others_.emplace_back(other, state_of(other));
  }
}

GeneratorStates::After GeneratorStates::After::now() {
  const at::Generator scope = RandomScope::current(), global = RandomScope::global();
  After found{.scope = {}, .global = state_of(global)};
  if (scope.defined() && scope != global) found.scope = state_of(scope);
  return found;
}

bool GeneratorStates::After::holds() const {
  if (!global.defined()) return true;
  const After found = now();
  return at::equal(global, found.global) &&
         (!scope.defined() || (found.scope.defined() && at::equal(scope, found.scope)));
}

// Locks the global generator for a thread, which may lock it again.
class GeneratorStates::Again::GlobalLock {
 public:
  explicit GlobalLock(base::Deadline::Clock::duration patience) {
    std::unique_lock lock(lender().mutex);
    lender().wait_until_free(lock, patience);
    lender().thread = std::this_thread::get_id();
    ++lender().depth;
  }
  ~GlobalLock() {
    {
      const std::lock_guard lock(lender().mutex);
      --lender().depth;
    }
    lender().changed.notify_all();
  }
  GlobalLock(const GlobalLock&) = delete;
  GlobalLock& operator=(const GlobalLock&) = delete;
};

GeneratorStates::Again::Again(const GeneratorStates& states, Global global,
                              base::Deadline::Clock::duration patience) {
  if (!states.is_taken_) return;
  if (global == Global::kItself) global_lock_ = std::make_unique<GlobalLock>(patience);
  for (const auto& [generator, state] : states.others_) lend(generator, state);
  at::Generator substitute = copy_of(states.global_);
  if (global == Global::kItself) {
    const at::Tensor state = state_of(substitute);
    substitute = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(lender().mutex);
    ++lender().times;
    ++times_lent_here;
    lend(substitute, state);
  }
  draws_.emplace(states.scope_.defined() ? copy_of(states.scope_) : substitute, substitute);
}

void GeneratorStates::Again::lend(at::Generator generator, const at::Tensor& state) {
  before_.emplace_back(generator, state_of(generator));
  set_state_of(std::move(generator), state);
}

GeneratorStates::Again::~Again() {
  for (const auto& [generator, state] : before_) set_state_of(generator, state);
}

GeneratorStates::After GeneratorStates::Again::after() const {
  return draws_ ? After::now() : After();
}

ReseededGenerators::ReseededGenerators(const std::vector<at::Generator>& generators) {
  for (at::Generator generator : generators) {
    const std::lock_guard lock(generator.mutex());
    before_.emplace_back(generator, generator.get_state());
    generator.set_current_seed(c10::detail::getNonDeterministicRandom());
  }
}

// Backwards: the first state of a generator that stands there twice is the one before.
ReseededGenerators::~ReseededGenerators() {
  for (auto each = before_.rbegin(); each != before_.rend(); ++each) set_state_of(each->first, each->second);
}

GlobalGeneratorAsFound::GlobalGeneratorAsFound(base::Deadline::Clock::duration patience) {
  std::unique_lock lock(lender().mutex);
  lender().wait_until_free(lock, patience);
  lent_before_ = lent_elsewhere();
  before_ = state_of(at::detail::getDefaultCPUGenerator());
}

bool GlobalGeneratorAsFound::holds() const {
  const std::lock_guard lock(lender().mutex);
  return is_as_found();
}

bool GlobalGeneratorAsFound::is_as_found() const {
  return lent_elsewhere() != lent_before_ || stands_at(before_);
}

bool GlobalGeneratorAsFound::stands_at(const at::Tensor& state) const {
  return are_same_bytes(state, state_of(at::detail::getDefaultCPUGenerator()));
}

bool GlobalGeneratorAsFound::is_seeded() const {
  const at::Generator& generator = at::detail::getDefaultCPUGenerator();
  const auto seeded = at::make_generator<at::CPUGeneratorImpl>(generator.current_seed());
  return are_same_bytes(state_of(generator), state_of(seeded));
}

// What other threads drew from it meanwhile stays drawn. Nobody lends it between the look and the change.
GlobalGeneratorAsFound::~GlobalGeneratorAsFound() {
  const std::lock_guard lock(lender().mutex);
  if (is_as_found()) return;
  if (restores_at_end_ || is_seeded()) set_state_of(at::detail::getDefaultCPUGenerator(), before_);
}

}  // namespace cohort::core
