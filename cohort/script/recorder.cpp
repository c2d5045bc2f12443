#include "cohort/script/recorder.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <list>
#include <mutex>
#include <unordered_set>

#include "cohort/core/error.h"

// Note [Two keys]
// A dispatch key is wanted that lies between autograd and BackendSelect and that nobody uses. `Fake` is such
// a one up to LibTorch 2.14, and takes one fallback for all operators, those too that are registered later.
// Where it is taken, the same kernel is registered for each operator on FuncTorchDynamicLayerBackMode, which
// has two kernels of its own (those operators are not recorded, and belong to functorch); operators that came
// later are added when a recording begins. While no recording is on, neither key is, and nothing costs
// anything.
namespace cohort::script {
namespace {

constexpr auto kFirstKey = c10::DispatchKey::Fake;
constexpr auto kSecondKey = c10::DispatchKey::FuncTorchDynamicLayerBackMode;

thread_local Tape* current_tape = nullptr;
std::atomic<std::uint64_t> lost_calls{0};

template <c10::DispatchKey kKey>
void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard inner_calls_are_the_kernels{c10::DispatchKeySet(kKey)};
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  if (current_tape == nullptr) {  // the engine took the thread's keys to another one
    lost_calls.fetch_add(1, std::memory_order_relaxed);
    op.redispatchBoxed(below, stack);
    return;
  }
  current_tape->call(op, below, stack);
}

// What is registered stays until the process ends, whatever is destroyed before.
using Handles = std::list<c10::RegistrationHandleRAII>;

bool register_first() {
  static const bool done = [] {
    auto& dispatcher = c10::Dispatcher::singleton();
    if (dispatcher.hasBackendFallbackForDispatchKey(kFirstKey)) return false;
    static auto& handles = *new Handles();
    handles.push_back(dispatcher.registerFallback(
        kFirstKey, c10::KernelFunction::makeFromBoxedFunction<&record<kFirstKey>>(), "cohort::script"));
    return true;
  }();
  return done;
}

void register_second() {
  static std::mutex mutex;
  static auto& handles = *new Handles();
  static auto& seen = *new std::unordered_set<c10::OperatorName>();
  const std::lock_guard lock(mutex);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!seen.insert(name).second) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(kSecondKey)) continue;
    handles.push_back(dispatcher.registerImpl(
        name, kSecondKey, c10::KernelFunction::makeFromBoxedFunction<&record<kSecondKey>>(), std::nullopt,
        nullptr, "cohort::script"));
  }
}

c10::DispatchKey choose(RecorderKey key) {
  if (key != RecorderKey::kSecond && register_first()) return kFirstKey;
  if (key == RecorderKey::kFirst) {
    throw UsageError("script.record", "the dispatch key Fake has a fallback of somebody else's",
                     "RecorderKey::kAuto");
  }
  register_second();
  return kSecondKey;
}

}  // namespace

Recording::Recording(Tape& tape, RecorderKey key)
    : tape_(tape),
      before_(current_tape),
      key_(choose(key)),
      key_before_(c10::impl::tls_is_dispatch_key_included(key_)),
      lost_before_(lost_calls.load(std::memory_order_relaxed)) {
  at::autocast::clear_cache();  // a cast that was kept from before would be missing on the tape
  current_tape = &tape;
  c10::impl::tls_set_dispatch_key_included(key_, true);
}

Recording::~Recording() {
  c10::impl::tls_set_dispatch_key_included(key_, key_before_);
  current_tape = before_;
  at::autocast::clear_cache();
  if (lost_calls.load(std::memory_order_relaxed) != lost_before_) {
    tape_.refuse("operators ran on another thread than the one that recorded");
  }
}

bool Recording::is_active() {
  return current_tape != nullptr;
}

}  // namespace cohort::script
