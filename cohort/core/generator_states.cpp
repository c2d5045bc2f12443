#include "cohort/core/generator_states.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <atomic>
#include <mutex>

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

// Held by who has lent the global generator a state.
std::recursive_mutex& lender_of_global() {
  static std::recursive_mutex& mutex = *new std::recursive_mutex;  // leaked: threads may outlive statics
  return mutex;
}
std::atomic<std::int64_t> times_lent{0};
thread_local std::int64_t times_lent_here = 0;

// How often other threads have lent it.
std::int64_t lent_elsewhere() {
  return times_lent.load() - times_lent_here;
}

}  // namespace

GeneratorStates::GeneratorStates(const std::vector<at::Generator>& others) : is_taken_(true) {
  const at::Generator scope = RandomScope::current(), global = RandomScope::global();
  global_ = copy_of(global);
  // One generator stays one.
  if (scope.defined() && scope != global) scope_ = copy_of(scope);
  for (const at::Generator& other : others) {
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

GeneratorStates::Again::Again(const GeneratorStates& states, Global global)
    : alone_(lender_of_global(), std::defer_lock) {
  if (!states.is_taken_) return;
  if (global == Global::kItself) {
    alone_.lock();
    times_lent.fetch_add(1);
    ++times_lent_here;
  }
  for (const auto& [generator, state] : states.others_) lend(generator, state);
  at::Generator stand_in = copy_of(states.global_);
  if (global == Global::kItself) {
    const at::Tensor state = state_of(stand_in);
    stand_in = at::detail::getDefaultCPUGenerator();
    lend(stand_in, state);
  }
  draws_.emplace(states.scope_.defined() ? copy_of(states.scope_) : stand_in, stand_in);
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

GlobalGeneratorAsFound::GlobalGeneratorAsFound() {
  const std::lock_guard alone(lender_of_global());
  lent_before_ = lent_elsewhere();
  before_ = state_of(at::detail::getDefaultCPUGenerator());
}

bool GlobalGeneratorAsFound::holds() const {
  return lent_elsewhere() != lent_before_ || stands_at(before_);
}

bool GlobalGeneratorAsFound::stands_at(const at::Tensor& state) const {
  return at::equal(state, state_of(at::detail::getDefaultCPUGenerator()));
}

bool GlobalGeneratorAsFound::is_seeded() const {
  const at::Generator& generator = at::detail::getDefaultCPUGenerator();
  const auto seeded = at::make_generator<at::CPUGeneratorImpl>(generator.current_seed());
  return at::equal(state_of(generator), state_of(seeded));
}

// What other threads drew from it meanwhile stays drawn.
GlobalGeneratorAsFound::~GlobalGeneratorAsFound() {
  if (holds()) return;
  if (is_put_back_ || is_seeded()) set_state_of(at::detail::getDefaultCPUGenerator(), before_);
}

}  // namespace cohort::core
