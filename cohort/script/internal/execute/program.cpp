// A run borrows a frame, a list of tensors by slot, and executes the instructions of a part in it. The first
// run of a part is its warm-up, on the thread that comes first, and runs beside it are plain. The warm-up
// publishes the part in its arena form (`ready`). Later runs write into tensors that stay in the frame.
// Always: one run owns a frame, so its values need no lock. An arena is reused only if no tensor of an
// earlier run holds a block of it. Surprising: a result at an unplanned place is copied out, and from then on
// the part runs plain.
#include "cohort/script/internal/execute/program.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <functional>
#include <list>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/core/thread_settings.h"
#include "cohort/script/fork.h"
#include "cohort/script/internal/ir/boxed.h"
#include "cohort/script/internal/record/guard.h"
#include "cohort/script/internal/record/recorder.h"
#include "cohort/script/internal/record/warm_up.h"

namespace cohort::script {
namespace {

// Sets the modes of calls; as before afterwards.
class Modes {
 public:
  ~Modes() { set(before_); }
  Modes() = default;
  Modes(const Modes&) = delete;
  Modes& operator=(const Modes&) = delete;
  void set(ModeBits modes) {
    if (modes == now_) return;
    change_modes(now_, modes);
    now_ = modes;
  }

 private:
  const ModeBits before_ = modes_now();
  ModeBits now_ = before_;
};

// In a warm-up, all on one thread: as many threads in an operator as there are where it runs later, so that
// numbers are the same to the last bit.
class AsInRegions {
 public:
  explicit AsInRegions(const std::vector<ParallelRegion>& regions)
      : lanes_(regions), threads_(at::get_num_threads()) {}
  ~AsInRegions() { set(threads_); }
  AsInRegions(const AsInRegions&) = delete;
  AsInRegions& operator=(const AsInRegions&) = delete;
  void before(std::size_t instruction) {
    set(std::ranges::any_of(lanes_,
                            [=](const ParallelRegion& region) {
                              return region.begin <= instruction && instruction < region.end;
                            })
            ? 1
            : threads_);
  }

 private:
  void set(int threads) {
    if (threads != now_) core::set_num_threads_this_thread(now_ = threads);
  }

  const std::vector<ParallelRegion>& lanes_;
  const int threads_;
  int now_ = threads_;
};

at::Tensor resident_tensor(Arena& arena, const Resident& resident, const Layout& layout) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), resident.bytes, arena.block(resident.offset),
                       /*allocator=*/nullptr, /*resizable=*/false);
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                           c10::scalarTypeToTypeMeta(layout.dtype));
  impl->set_sizes_and_strides(layout.sizes, layout.strides);
  return at::Tensor(std::move(impl));
}

// A view and its base count changes together.
void share_versions(const at::Tensor& view, const at::Tensor& base) {
  if (!view.defined() || !base.defined() || view.is_inference() || base.is_inference()) return;
  view.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
}

[[noreturn]] void throw_other_results(const OperatorCall& call, const std::string& what) {
  throw UsageError("script.replay", base::concat(call.name(), " returned ", what),
                   call.is_custom_op
                       ? "at::Tag::dynamic_output_shape where the operator is defined, so that it stays eager"
                       : "the plain function for these inputs, and clear()");
}

// The calls that follow take the sizes for fixed: not every operator whose sizes depend on values has the
// tag.
void check_sizes(const OperatorCall& call, const at::Tensor& tensor, const Layout& expected) {
  if (!tensor.defined() || is_laid_out(tensor, expected)) return;
  throw_other_results(
      call, base::concat("sizes ", tensor.sizes(), " and strides ", tensor.strides(), ", recorded were ",
                         c10::IntArrayRef(expected.sizes), " and ", c10::IntArrayRef(expected.strides)));
}

}  // namespace

Program::Program(Trace trace) : trace_(std::move(trace)), plan_(trace_) {
  for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
    parts_[static_cast<std::size_t>(phase)].plain = compile_plain(trace_, plan_, phase);
  }
  for (const Value& value : trace_.tape.values()) {
    if (value.source != Source::kCaptured) continue;
    const at::Tensor& tensor = value.tensor;
    captured_.push_back({&value, tensor.storage().unsafeGetStorageImpl(), tensor.storage().data(),
                         tensor.storage().nbytes(), tensor.requires_grad()});
    captured_storages_.insert(captured_.back().storage);
  }
  for (const std::vector<int>* slots :
       {&trace_.inputs, &trace_.outputs, &plan_.saved, &trace_.grad_outputs, &trace_.gradients}) {
    for (const int slot : *slots) {
      if (slot >= 0 && !plan_.hoisted[at_slot(slot)]) handed_over_.push_back(slot);
    }
  }
}

Program::~Program() {
  delete spare_.load();
}

std::size_t Program::arena_bytes() const {
  std::size_t bytes = 0;
  for (const PhaseCode& code : parts_) {
    if (const CompiledPhase* ready = code.ready.load(std::memory_order_acquire)) {
      bytes = std::max(bytes, ready->arena_bytes);
    }
  }
  return bytes;
}

std::size_t Program::num_outs() const {
  std::size_t count = 0;
  for (const PhaseCode& code : parts_) {
    if (const CompiledPhase* ready = code.ready.load(std::memory_order_acquire)) count += ready->num_outs;
  }
  return count;
}

bool Program::captures_valid() const {
  return std::all_of(captured_.begin(), captured_.end(), [](const Captured& each) {
    const c10::TensorImpl& tensor = *each.value->tensor.unsafeGetTensorImpl();
    const c10::StorageImpl* const storage = tensor.unsafe_storage().unsafeGetStorageImpl();
    const Layout& layout = each.value->layout;
    return storage == each.storage && storage->nbytes() == each.storage_bytes &&
           storage->data() == each.memory && tensor.dtype().toScalarType() == layout.dtype &&
           is_laid_out(each.value->tensor, layout) && tensor.storage_offset() == layout.offset &&
           tensor.requires_grad() == each.requires_grad && !has_tangent(each.value->tensor);
  });
}

bool Program::meets_captured(std::span<const at::Tensor> inputs) const {
  return std::any_of(inputs.begin(), inputs.end(), [this](const at::Tensor& input) {
    return input.defined() &&
           captured_storages_.holds(input.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  });
}

void StorageSet::insert(const c10::StorageImpl* storage) {
  const std::uint64_t hash = hash_of(storage);
  bits_[hash / 64] |= std::uint64_t(1) << (hash % 64);
  sorted_.insert(std::ranges::lower_bound(sorted_, storage, std::less<>()), storage);
}

bool StorageSet::is_among(const c10::StorageImpl* storage) const {
  return std::ranges::binary_search(sorted_, storage, std::less<>());
}

std::unique_ptr<Frame> Program::borrow(std::span<const at::Tensor> inputs) const {
  const bool is_recorded = Recording::is_active();
  auto frame = is_recorded ? new_frame() : idle_frame();
  frame->is_recorded = is_recorded;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (trace_.inputs[i] >= 0) frame->values[at_slot(trace_.inputs[i])] = inputs[i];
  }
  return frame;
}

std::unique_ptr<Frame> Program::idle_frame() const {
  if (Frame* const spare = spare_.exchange(nullptr, std::memory_order_acq_rel)) {
    return std::unique_ptr<Frame>(spare);
  }
  {
    const std::lock_guard lock(mutex_);
    if (!frames_.empty()) {
      auto frame = std::move(frames_.back());
      frames_.pop_back();
      return frame;
    }
  }
  return new_frame();
}

std::unique_ptr<Frame> Program::new_frame() const {
  auto frame = std::make_unique<Frame>();
  frame->values = plan_.fixed;
  return frame;
}

void Program::release(Frame& frame, const std::vector<int>& slots) const {
  for (const int slot : slots) {
    if (slot >= 0 && !plan_.hoisted[at_slot(slot)]) frame.values[at_slot(slot)].reset();
  }
}

void Program::give_back(std::unique_ptr<Frame> frame) const {
  if (frame->is_recorded) return;
  release(*frame, handed_over_);
  frame->stack.clear();
  Frame* none = nullptr;
  if (spare_.compare_exchange_strong(none, frame.get(), std::memory_order_acq_rel)) {
    frame.release();
    return;
  }
  const std::lock_guard lock(mutex_);
  if (frames_.size() + 1 < kMaxIdleFrames) frames_.push_back(std::move(frame));
}

// Puts the residents of a part into the frame, in an arena that nothing of an earlier run lies in any more.
void Program::prepare(Frame& frame, Phase phase, const CompiledPhase& compiled) const {
  // The frame and its residents hold the arena. Another holder is a tensor that the user kept.
  const bool is_held = frame.arena && frame.arena.use_count() > 1 + frame.num_resident_blocks;
  if (!frame.arena || frame.arena->bytes() < compiled.arena_bytes || is_held) {
    // Both parts lie in one arena, so the residents of both go before it does.
    for (const CompiledPhase*& prepared : frame.prepared) {
      if (prepared == nullptr) continue;
      for (const Resident& resident : prepared->residents) frame.values[at_slot(resident.slot)].reset();
      prepared = nullptr;
    }
    frame.num_resident_blocks = 0;
    frame.arena.reset();  // before there is another one
    frame.arena = c10::make_intrusive<Arena>(arena_bytes());
  }
  const CompiledPhase*& prepared = frame.prepared[static_cast<std::size_t>(phase)];
  if (prepared == &compiled) return;
  for (const Resident& resident : compiled.residents) {
    const Layout& layout = trace_.tape.values()[at_slot(resident.slot)].layout;
    at::Tensor& tensor = frame.values[at_slot(resident.slot)];
    if (resident.view_of != kUndefined) {
      tensor = view_of(frame.values[at_slot(resident.view_of)], layout, resident.offset);
    } else {
      tensor = resident_tensor(*frame.arena, resident, layout);
      ++frame.num_resident_blocks;
    }
  }
  prepared = &compiled;
}

// Of an operator that was called without boxing, which is done once.
void Program::check_results(const OperatorCall& call, const Frame& frame) const {
  each_slot(call.results, [&](int slot) {
    check_sizes(call, frame.values[at_slot(slot)], trace_.tape.values()[at_slot(slot)].layout);
  });
}

void Program::store_results(const OperatorCall& call, Frame& frame, torch::jit::Stack& stack) const {
  const std::size_t first = stack.size() - call.num_results;
  const auto store = [&](int slot, at::Tensor&& tensor) {
    if (slot >= 0) check_sizes(call, tensor, trace_.tape.values()[at_slot(slot)].layout);
    if (slot >= 0 && !plan_.hoisted[at_slot(slot)] &&
        trace_.tape.values()[at_slot(slot)].source == Source::kMade) {
      at::Tensor& made = frame.values[at_slot(slot)] = std::move(tensor);
      if (call.is_view) share_versions(made, frame.values[at_slot(call.inputs.front().slots.front())]);
    }
  };
  for (const TensorPlace& result : call.results) {
    c10::IValue& value = stack[first + result.index];
    if (result.kind == TensorPlace::ArgumentType::kTensor) {
      store(result.slots.front(), std::move(value).toTensor());
    } else {
      Tensors tensors = value.toTensorVector();
      if (tensors.size() != result.slots.size()) {
        throw_other_results(call,
                            base::concat(tensors.size(), " tensors, recorded were ", result.slots.size()));
      }
      for (std::size_t i = 0; i < tensors.size(); ++i) store(result.slots[i], std::move(tensors[i]));
    }
  }
  stack.clear();
}

void Program::run_instruction(const Instruction& instruction, Frame& frame, torch::jit::Stack& stack,
                              KernelCallOptions options) const {
  if (instruction.call == nullptr) {
    frame.values[at_slot(instruction.view)] =
        view_of(frame.values[at_slot(instruction.view_of)],
                trace_.tape.values()[at_slot(instruction.view)].layout, instruction.offset);
  } else if (instruction.unboxed != nullptr && !options.is_observed) {
    instruction.unboxed->run(frame.values);
  } else {
    run_boxed(*instruction.call, frame.values, stack, options);
    store_results(*instruction.call, frame, stack);
  }
}

// An operator that suddenly allocates in another order may have given its result a block that is meant for
// something shorter-lived.
bool Program::is_placed(const Instruction& instruction, Frame& frame) const {
  return std::all_of(instruction.placed.begin(), instruction.placed.end(), [&](const auto& place) {
    return frame.arena->begins(frame.values[at_slot(place.first)].storage().data(), place.second);
  });
}

// `stack` is the calling thread's own.
void Program::run_instructions(Frame& frame, torch::jit::Stack& stack,
                               std::span<const Instruction> instructions, const PhaseCode& code,
                               KernelCallOptions options) const {
  Modes modes;
  ArenaSource source(frame.arena.get());
  const MemoryScope scope(&source);
  for (const Instruction& instruction : instructions) {
    modes.set(instruction.modes);
    source.expect(instruction.blocks);
    if (instruction.unboxed != nullptr &&
        !options.is_observed) {  // most are, and small ones take less than a call
      instruction.unboxed->run(frame.values);
    } else {
      run_instruction(instruction, frame, stack, options);
    }
    if (!instruction.placed.empty() && !is_placed(instruction, frame)) {
      source.expect({});
      for (const auto& [slot, offset] : instruction.placed) {
        at::Tensor& made = frame.values[at_slot(slot)];
        made = at::empty_strided(made.sizes(), made.strides(), made.options()).copy_(made);
      }
      code.is_trusted.store(false, std::memory_order_relaxed);
    }
    for (const int slot : instruction.releases) frame.values[at_slot(slot)].reset();
  }
}

void Program::run_phase(Frame& frame, const CompiledPhase& compiled, const PhaseCode& code,
                        KernelCallOptions options) const {
  if (compiled.regions.empty()) {
    run_instructions(frame, frame.stack, compiled.instructions, code, options);
  } else {
    run_regions(frame, compiled, code, options);
  }
  for (const int slot : compiled.releases_at_end) frame.values[at_slot(slot)].reset();
}

// Goes through the instructions, handing regions to other threads, and waits for each where it is to join.
void Program::run_regions(Frame& frame, const CompiledPhase& compiled, const PhaseCode& code,
                          KernelCallOptions options) const {
  struct Running {
    std::size_t join;
    ForkedPart part;
  };
  const std::span<const Instruction> all = compiled.instructions;
  const bool has_one_thread = at::get_num_threads() == 1;
  std::list<Running> running;  // a part that is destroyed before it has ended is waited for
  const auto start = [&](const ParallelRegion& region) {
    const auto instructions = all.subspan(region.begin, region.end - region.begin);
    if (region.join == region.end && has_one_thread) {  // nothing runs beside it
      run_instructions(frame, frame.stack, instructions, code, options);
      return;
    }
    auto run = [this, &frame, &code, instructions, options](const Tensors&) {
      torch::jit::Stack stack;
      run_instructions(frame, stack, instructions, code, options);
      return Tensors();
    };
    running.push_back({region.join, ForkedPart(std::move(run), {}, ForkedPart::Graph::kNone)});
  };
  const auto join = [](ForkedPart& part) {
    while (!part.ends_by(base::Deadline(kForkTimeout))) {
      base::log_warning(
          "[script.replay] a forked part has not ended yet, and is waited for: it writes to what the replay "
          "holds");
    }
    part.wait(base::Deadline::never());
    return true;
  };
  auto next = compiled.regions.begin();
  for (std::size_t at = 0;;) {
    // Joins come before starts: a region that begins here may read what the joined one wrote.
    std::erase_if(running, [&](Running& each) { return each.join == at && join(each.part); });
    if (next != compiled.regions.end() && next->begin == at) {
      start(*next);
      at = next++->end;
      continue;
    }
    if (at == all.size()) return;
    std::size_t end = next == compiled.regions.end() ? all.size() : next->begin;
    for (const Running& each : running) end = std::min(end, each.join);
    run_instructions(frame, frame.stack, all.subspan(at, end - at), code, options);
    at = end;
  }
}

// Actions [first, last) of the part, and what follows from all of them when they were the last ones.
void Program::warm_up_run(Frame& frame, Phase phase, std::size_t first, std::size_t last,
                          KernelCallOptions options) const {
  const PhaseCode& code = parts_[static_cast<std::size_t>(phase)];
  WarmUp& warm_up = *frame.warm_up;
  {
    Modes modes;
    const MemoryScope scope(&warm_up.log());
    AsInRegions threads(code.plain.regions);
    for (std::size_t i = first; i < last; ++i) {
      const Instruction& instruction = code.plain.instructions[i];
      modes.set(instruction.modes);
      threads.before(i);
      warm_up.before(i);
      run_instruction(instruction, frame, frame.stack, options);
      if (instruction.unboxed != nullptr) check_results(*instruction.call, frame);
      warm_up.after(i, frame.values);
      for (const int slot : instruction.releases) frame.values[at_slot(slot)].reset();
    }
  }
  if (last < code.plain.instructions.size()) {
    if (last > first) warm_up.pause(last - 1);
    return;
  }
  for (const int slot : code.plain.releases_at_end) frame.values[at_slot(slot)].reset();
  // Written once; other threads see it through the store that follows.
  code.arena = std::make_unique<const CompiledPhase>(warm_up.finish());
  code.ready.store(code.arena.get(), std::memory_order_release);
  frame.warm_up.reset();
}

// Decides how a run of the part goes.
void Program::begin(Frame& frame, Phase phase) const {
  const PhaseCode& code = parts_[static_cast<std::size_t>(phase)];
  const CompiledPhase* const ready = code.ready.load(std::memory_order_acquire);
  if (frame.is_recorded) {
    frame.compiled = &code.plain;
  } else if (ready != nullptr && code.is_trusted.load(std::memory_order_relaxed)) {
    prepare(frame, phase, *ready);
    frame.compiled = ready;
  } else if (ready == nullptr && !code.is_warmed_up.exchange(true)) {
    frame.compiled = nullptr;
    // Where it does not come to its end, another run is the warm-up.
    const auto reset_warm_up = [&code](WarmUp* warm_up) {
      if (code.ready.load(std::memory_order_relaxed) == nullptr) code.is_warmed_up.store(false);
      delete warm_up;
    };
    frame.warm_up = {new WarmUp(trace_, plan_, phase, code.plain), reset_warm_up};
  } else {
    frame.compiled = &code.plain;
  }
}

void Program::run(Frame& frame, Phase phase, std::size_t first_call, std::size_t end_call) const {
  // Kernels were recorded below autograd. What they write is counted later, by bump_versions().
  const at::AutoDispatchBelowADInplaceOrView below;
  const KernelCallOptions options{.in_random_scope = c10::impl::tls_is_dispatch_key_included(kRandomKey),
                                  .is_observed = at::hasCallbacks()};
  const PhaseCode& code = parts_[static_cast<std::size_t>(phase)];
  const bool is_backward = phase == Phase::kBackward;
  // Later segments of a backward run as its first one began.
  if (first_call == (is_backward ? trace_.split : 0)) begin(frame, phase);
  const CompiledPhase& compiled = frame.compiled == nullptr ? code.plain : *frame.compiled;
  std::size_t first = 0, last = compiled.instructions.size();
  if (is_backward && trace_.segments.size() > 1) {
    // Steps of a cut backward keep the tape's order, so numbers of calls are sorted here.
    const auto place_of = [&](std::size_t call) {
      return std::ranges::lower_bound(compiled.instructions, call, {}, &Instruction::number) -
             compiled.instructions.begin();
    };
    first = static_cast<std::size_t>(place_of(first_call));
    last = static_cast<std::size_t>(place_of(end_call));
  }
  if (frame.warm_up != nullptr) {
    try {
      warm_up_run(frame, phase, first, last, options);
    } catch (...) {
      frame.warm_up.reset();
      throw;
    }
  } else if (last - first < compiled.instructions.size()) {
    const auto segment = std::span(compiled.instructions).subspan(first, last - first);
    run_instructions(frame, frame.stack, segment, code, options);
  } else {
    run_phase(frame, compiled, code, options);
  }
}

void Program::bump_versions(const Frame& frame, Phase phase) const {
  for (const int slot : plan_.written[static_cast<std::size_t>(phase)]) {
    const at::Tensor& tensor = frame.values[at_slot(slot)];
    if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace cohort::script
