// While a Recording lives, a boxed kernel on a spare dispatch key sees each operator of its thread. It hands
// the call to the tape, which runs it on the keys below. The kernel excludes its own key meanwhile, so what a
// kernel calls is not recorded. Autograd lies above the key, so operators of backward are recorded too.
// Always: the constructor sets thread-local state (tape, generator, key, observer), and the destructor puts
// it back. Surprising: operators that the engine runs on another thread reach no tape. They mark it
// unsupported.
#include "cohort/script/internal/record/recorder.h"

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <list>
#include <mutex>
#include <unordered_set>

#include "cohort/base/error.h"
#include "cohort/core/random_scope.h"

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
thread_local at::Generator* current_generator = nullptr;  // that the recording began with

// Travels with LibTorch's thread-local state to threads that run operators on the recording thread's behalf.
struct LostCalls : c10::DebugInfoBase {
  std::atomic<bool> any{false};
};
const auto kLostCalls =
    c10::DebugInfoKind::MOBILE_RUNTIME_INFO;  // the lite interpreter's, which does not record

// True if `op` is to draw, and from another generator than one that ran where the recording began would.
bool draws_elsewhere(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (core::RandomScope::current() == *current_generator) return false;
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack.size() - arguments.size();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator" && stack[first + i].isNone()) return true;
  }
  return false;
}

// Composites that read or write a tensor's numbers in C++: the operators that they consist of do not show it.
bool works_on_numbers(const c10::OperatorName& name) {
  static const std::unordered_set<c10::OperatorName> names = {
      {"aten::tensor_split", "tensor_indices_or_sections"},
      {"aten::_pad_packed_sequence", ""},
      {"aten::lstm", "data"},
      {"aten::gru", "data"},
      {"aten::rnn_tanh", "data"},
      {"aten::rnn_relu", "data"},
      {"aten::_reshape_from_tensor", ""},
      {"aten::choose_qparams_optimized", ""},
      {"aten::_sobol_engine_initialize_state_", ""},
      {"aten::_sobol_engine_scramble_", ""},
  };
  return names.count(name) != 0;
}

// Composites never come to the recorder's key, but observers are told of them.
std::unique_ptr<at::ObserverContext> observe(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  if (current_tape != nullptr && name && works_on_numbers(*name)) {
    current_tape->mark_unsupported(
        base::concat(c10::toString(*name), " reads the numbers of a tensor in C++, or writes them"));
  }
  return nullptr;
}

template <c10::DispatchKey kKey>
void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard inner_calls_are_the_kernels{c10::DispatchKeySet(kKey)};
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  if (current_tape == nullptr) {  // the engine took the thread's keys to another one
    if (auto* lost = dynamic_cast<LostCalls*>(c10::ThreadLocalDebugInfo::get(kLostCalls))) lost->any = true;
    op.redispatchBoxed(below, stack);
    return;
  }
  if (draws_elsewhere(op, *stack)) {
    current_tape->mark_unsupported(base::concat(
        c10::toString(op.operator_name()), " draws in a core::RandomScope that begins within the function"));
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
      generator_(core::RandomScope::current()),
      generator_before_(current_generator),
      key_(choose(key)),
      key_before_(c10::impl::tls_is_dispatch_key_included(key_)),
      lost_calls_(std::make_shared<LostCalls>()),
      told_(kLostCalls, lost_calls_) {
  observer_ =
      at::addThreadLocalCallback(at::RecordFunctionCallback(&observe).scopes({at::RecordScope::FUNCTION}));
  at::autocast::clear_cache();  // a cast that was kept from before would be missing on the tape
  current_tape = &tape;
  current_generator = &generator_;
  c10::impl::tls_set_dispatch_key_included(key_, true);
}

Recording::~Recording() {
  c10::impl::tls_set_dispatch_key_included(key_, key_before_);
  at::removeCallback(observer_);
  current_tape = before_;
  current_generator = generator_before_;
  at::autocast::clear_cache();
  if (static_cast<const LostCalls&>(*lost_calls_).any) {
    tape_.mark_unsupported("operators ran on another thread than the one that recorded");
  }
}

Tape* Recording::tape() {
  return current_tape;
}

}  // namespace cohort::script
