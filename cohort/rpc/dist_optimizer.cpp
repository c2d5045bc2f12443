// Parameters stay where they are. Each owner gets an OwnerOptimizer for its own, which is a remote object. A
// step is one call to each owner: all calls are made before the first is waited for, and all are waited for
// before an error is thrown. So a step that fails leaves no call under way, but other owners may have taken
// it. Learning rates and momentum that were set travel with the next step, and need no call of their own.
// Each owner has a rate of its own: a state that was loaded may hold another initial rate for each.
#include "cohort/rpc/dist_optimizer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <type_traits>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/text/format_list.h"
#include "cohort/rpc/function.h"
#include "cohort/rpc/internal/agent/agent_state.h"
#include "cohort/rpc/internal/caller_state.h"
#include "cohort/rpc/internal/owner_optimizer.h"

namespace cohort::rpc {
namespace {

constexpr const char* kWhereOptimizer = "rpc.dist_optimizer";

// What each owner answered. Throws where any failed: what it threw, or all texts.
template <typename T>
std::vector<typename Future<T>::Value> answers_of(std::vector<Future<T>>& calls) {
  std::vector<typename Future<T>::Value> answers;
  std::vector<std::exception_ptr> errors;
  for (Future<T>& call : calls) {
    try {
      if constexpr (std::is_void_v<T>) {
        call.get();
      } else {
        answers.push_back(call.get());
      }
    } catch (...) {
      errors.push_back(std::current_exception());
    }
  }
  if (errors.size() == 1) std::rethrow_exception(errors.front());
  if (errors.empty()) return answers;
  base::TextList text("; ");
  text.add(errors.size(), " of ", calls.size(), " owners failed");
  for (const std::exception_ptr& error : errors) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& exception) {
      text.add(base::message_of(exception));
    }
  }
  throw RemoteError(kWhereOptimizer, text.text());
}

// Has `call(owner)` call each owner, and returns what they answered. Gradients do not travel with these
// calls, and no seeds: how many owners there are must not decide what later calls draw.
template <typename T, typename Owners, typename Call>
auto ask_all(const Owners& owners, const Call& call) {
  const at::NoGradGuard no_grad;
  const SeedScope no_seeds(std::nullopt);
  std::vector<Future<T>> calls;
  for (const auto& owner : owners) {
    try {
      calls.push_back(call(owner));
    } catch (...) {  // its owner is gone: the others are asked all the same
      Promise<T> failed;
      failed.set_error(std::current_exception());
      calls.push_back(failed.future());
    }
  }
  return answers_of(calls);
}

}  // namespace

DistributedOptimizer::DistributedOptimizer(const std::vector<RRef<at::Tensor>>& parameters,
                                           const optim::OptimizerOptions& options) {
  if (parameters.empty()) throw UsageError(kWhereOptimizer, "there are no parameters");
  const at::NoGradGuard no_grad;
  const SeedScope no_seeds(std::nullopt);
  std::map<std::string, std::vector<RRef<at::Tensor>>> by_owner;
  for (const RRef<at::Tensor>& parameter : parameters) by_owner[parameter.owner().name].push_back(parameter);
  for (const auto& [name, own] : by_owner) {
    owners_.push_back({name, RRef<OwnerOptimizer>(own.front().reference()->make(
                                 {}, name_of<&make_owner_optimizer>(),
                                 encode_arguments<&make_owner_optimizer>(own, options)))});
  }
  ask_initial_lrs();
}

DistributedOptimizer::~DistributedOptimizer() = default;

void DistributedOptimizer::step(const dist_autograd::Context& context) {
  if (!owners_.front().optimizer.reference()->is_of(*context.agent_)) {
    throw UsageError(kWhereOptimizer,
                     "the context belongs to another agent of this process than the parameters",
                     "Context context(agent), with the agent that gave the references");
  }
  ask_all<void>(owners_, [&](const Owner& owner) {
    return owner.optimizer.rpc_async<&OwnerOptimizer::step>(context.id(), owner.lr, momentum_);
  });
  // Not where a step has failed: the next step takes the rates along again.
  drop_rates();
}

void DistributedOptimizer::apply(const optim::LRSchedule& schedule, std::int64_t step) {
  std::vector<double> rates;
  for (const Owner& owner : owners_) rates.push_back(schedule.checked_lr(step, owner.initial_lr));
  for (std::size_t i = 0; i < owners_.size(); ++i) owners_[i].lr = rates[i];
  momentum_ = schedule.momentum(step);
}

void DistributedOptimizer::set_lr(double lr) {
  for (Owner& owner : owners_) owner.lr = lr;
}

void DistributedOptimizer::drop_rates() {
  for (Owner& owner : owners_) owner.lr.reset();
  momentum_.reset();
}

std::map<std::string, optim::OptimizerState> DistributedOptimizer::state() const {
  std::vector<optim::OptimizerState> states = ask_all<optim::OptimizerState>(
      owners_, [](const Owner& owner) { return owner.optimizer.rpc_async<&OwnerOptimizer::state>(); });
  std::map<std::string, optim::OptimizerState> by_owner;
  for (std::size_t i = 0; i < owners_.size(); ++i) by_owner[owners_[i].name] = std::move(states[i]);
  return by_owner;
}

void DistributedOptimizer::load_state(const std::map<std::string, optim::OptimizerState>& state) {
  const bool same_owners =
      state.size() == owners_.size() &&
      std::ranges::all_of(owners_, [&](const Owner& owner) { return state.count(owner.name) > 0; });
  if (!same_owners) {
    base::TextList saved_owners(" "), own_owners(" ");
    for (const auto& [name, unused] : state) saved_owners.add(name);
    for (const Owner& owner : owners_) own_owners.add(owner.name);
    throw DataError(kWhereOptimizer,
                    base::concat("the state is that of the workers ", saved_owners.text(),
                                 ", and the parameters are on ", own_owners.text()),
                    "the state of an optimizer of the same workers");
  }
  ask_all<void>(owners_, [&](const Owner& owner) {
    return owner.optimizer.rpc_async<&OwnerOptimizer::load_state>(state.at(owner.name));
  });
  drop_rates();  // what was set before belongs to the state that is gone
  ask_initial_lrs();
}

void DistributedOptimizer::ask_initial_lrs() {
  const std::vector<double> rates = ask_all<double>(
      owners_, [](const Owner& owner) { return owner.optimizer.rpc_async<&OwnerOptimizer::initial_lr>(); });
  for (std::size_t i = 0; i < owners_.size(); ++i) owners_[i].initial_lr = rates[i];
}

}  // namespace cohort::rpc
