// A handler runs as its caller's thread would have run the function, where a thread's state decides what is
// computed. A scope sets the state of the caller, and restores what the thread had: LibTorch's defaults, or
// the state of a thread that waits for an answer and meanwhile reads what comes.
//
// Autocast's cache of casts belongs to the process: another thread may clear it in the middle of a handler,
// and gradients of a parameter that is used twice would be added up in another element type then. So handlers
// do not use the cache. Each use of a parameter casts it.
//
// LibTorch's generator belongs to the process too: handlers take turns at it by chance. A handler with a seed
// draws from a core::RandomScope instead, which is its thread's alone. Its own calls get seeds by their order
// in its program, so neither time nor place decides what is drawn.
#include "cohort/rpc/internal/caller_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>

#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/random.h"

namespace cohort::rpc {
namespace {

constexpr std::array kAutocastDevices{at::kCPU, at::kCUDA};

thread_local SeedScope* current_seeds = nullptr;

void check_autocast(const AutocastOn& on) {
  bool is_known = false;
  for (const c10::DeviceType device : kAutocastDevices) {
    is_known = is_known || on.device == static_cast<std::int8_t>(device);
  }
  const bool is_type = on.dtype >= 0 && on.dtype < static_cast<int>(at::ScalarType::NumOptions);
  if (is_known && is_type && at::isFloatingType(static_cast<at::ScalarType>(on.dtype))) return;
  throw CommError("rpc.receive",
                  base::concat("a call comes with autocast to elements of type ", static_cast<int>(on.dtype),
                               " on a device of type ", static_cast<int>(on.device)),
                  "the same program on all workers");
}

}  // namespace

CallerState CallerState::of_next_call() {
  CallerState state;
  state.grad_mode = at::GradMode::is_enabled();
  for (const c10::DeviceType device : kAutocastDevices) {
    if (!at::autocast::is_autocast_enabled(device)) continue;
    state.autocast.push_back({static_cast<std::int8_t>(device),
                              static_cast<std::int8_t>(at::autocast::get_autocast_dtype(device))});
  }
  state.seed = SeedScope::next();
  return state;
}

SeedScope::SeedScope(std::optional<std::uint64_t> seed, std::uint64_t first_call)
    : seed_(seed), num_calls_(first_call), outer_(std::exchange(current_seeds, this)) {}

SeedScope* SeedScope::current() {
  return current_seeds;
}

// Scopes may end in another order than they began, as contexts do.
SeedScope::~SeedScope() {
  SeedScope** at = &current_seeds;
  while (*at != nullptr && *at != this) at = &(*at)->outer_;
  if (*at == this) *at = outer_;
}

std::optional<std::uint64_t> SeedScope::next() {
  SeedScope* const scope = current_seeds;
  if (scope == nullptr || !scope->seed_) return std::nullopt;
  return base::RandomStream(*scope->seed_, 0, scope->num_calls_++, base::Purpose::kPart).next_u64();
}

CallerStateScope::CallerStateScope(const CallerState& state)
    : grad_mode_(state.grad_mode),
      seeds_(state.seed),
      is_cached_before_(at::autocast::is_autocast_cache_enabled()) {
  for (const AutocastOn& on : state.autocast) check_autocast(on);
  // A thread that waits in the second run of autograd::recompute() has copies in the place of both
  // generators. A handler that it runs meanwhile must not draw from these.
  const at::Generator& global = at::detail::getDefaultCPUGenerator();
  if (core::RandomScope::current().defined() || core::RandomScope::global() != global) {
    global_.emplace(at::Generator(), global);
  }
  if (state.seed) random_.emplace(core::RandomKey{.seed = *state.seed});
  // Nothing below throws.
  at::autocast::set_autocast_cache_enabled(state.autocast.empty());
  for (std::size_t i = 0; i < kAutocastDevices.size(); ++i) {
    const c10::DeviceType device = kAutocastDevices[i];
    before_[i] = {at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)};
    if (before_[i].is_on) at::autocast::set_autocast_enabled(device, false);
  }
  for (const AutocastOn& on : state.autocast) {
    const auto device = static_cast<c10::DeviceType>(on.device);
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, static_cast<at::ScalarType>(on.dtype));
  }
}

CallerStateScope::~CallerStateScope() {
  for (std::size_t i = 0; i < kAutocastDevices.size(); ++i) {
    at::autocast::set_autocast_dtype(kAutocastDevices[i], before_[i].dtype);
    at::autocast::set_autocast_enabled(kAutocastDevices[i], before_[i].is_on);
  }
  at::autocast::set_autocast_cache_enabled(is_cached_before_);
}

}  // namespace cohort::rpc
