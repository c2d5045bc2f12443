#include "cohort/script/program.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <unordered_set>

#include "cohort/core/error.h"

namespace cohort::script {
namespace {

using Kind = TensorPlace::Kind;

constexpr auto kAutocastKeys = c10::autocast_dispatch_keyset;
constexpr auto kRandomKey = c10::DispatchKey::CustomRNGKeyId;  // core::RandomScope's

// Modes that kernels may ask for, as they were when the call was recorded; as before afterwards.
class Modes {
 public:
  Modes()
      : grad_(at::GradMode::is_enabled()),
        below_(c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU)),
        now_grad_(grad_),
        now_below_(below_) {}
  ~Modes() { set(grad_, below_); }
  Modes(const Modes&) = delete;
  Modes& operator=(const Modes&) = delete;
  void set(bool grad, bool below) {
    if (grad != now_grad_) at::GradMode::set_enabled(now_grad_ = grad);
    if (below != now_below_) {
      c10::impl::tls_set_dispatch_key_excluded(c10::DispatchKey::AutocastCPU, now_below_ = below);
    }
  }

 private:
  bool grad_, below_, now_grad_, now_below_;
};

at::Tensor another_handle(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true));
}

template <typename Places, typename Fn>
void each_slot(const Places& places, const Fn& fn) {
  for (const TensorPlace& place : places) {
    for (const int slot : place.slots) {
      if (slot >= 0) fn(slot);
    }
  }
}

}  // namespace

Program::Program(Recorded recorded) : recorded_(std::move(recorded)) {
  const auto& values = recorded_.tape.values();
  fixed_.resize(values.size());
  hoisted_.resize(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Value& value = values[i];
    if (value.source != Source::kCaptured && value.source != Source::kConstant) continue;
    fixed_[i] = value.tensor;
    hoisted_[i] = true;
    if (value.source == Source::kCaptured) {
      homes_.emplace_back(value.tensor, value.tensor.storage().unsafeGetStorageImpl());
    }
  }
  plan();
  find_effects();
  plan_lives();
}

void Program::plan() {
  const auto& calls = recorded_.tape.calls();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    if (i == recorded_.split) split_ = steps_.size();
    if (is_elided(calls[i]) || plan_views(i, steps_)) continue;
    steps_.push_back({.call = i, .drop = {}});
  }
  if (recorded_.split >= calls.size()) split_ = steps_.size();
}

// A view that is the same value as what it is a view of: detach().
bool Program::is_elided(const Call& call) const {
  return call.is_view && call.inputs.size() == 1 && call.results.size() == 1 &&
         call.inputs.front().slots == call.results.front().slots;
}

bool Program::plan_views(std::size_t number, std::vector<Step>& steps) {
  const auto& values = recorded_.tape.values();
  const Call& call = recorded_.tape.calls()[number];
  if (!call.is_view || call.inputs.empty() || call.inputs.front().slots.size() != 1) return false;
  const int base = call.inputs.front().slots.front();
  if (base < 0) return false;
  const Value& from = values[at_slot(base)];
  bool plain = true;
  each_slot(call.results, [&](int slot) {
    const Value& to = values[at_slot(slot)];
    plain &= to.source == Source::kMade && to.storage == from.storage &&
             to.layout.dtype == from.layout.dtype && !to.layout.conjugate && !to.layout.negative &&
             !from.layout.conjugate && !from.layout.negative;
  });
  if (!plain) return false;
  each_slot(call.results, [&](int slot) {
    if (slot == base || hoisted_[at_slot(slot)]) return;
    const Layout& to = values[at_slot(slot)].layout;
    const std::int64_t offset = to.offset - from.layout.offset;
    if (hoisted_[at_slot(base)]) {
      fixed_[at_slot(slot)] = view_of(fixed_[at_slot(base)], to, offset);
      hoisted_[at_slot(slot)] = true;
      return;
    }
    steps.push_back({.call = number, .view_of = base, .view = slot, .offset = offset, .drop = {}});
  });
  return true;
}

void Program::find_effects() {
  const auto& values = recorded_.tape.values();
  const auto& calls = recorded_.tape.calls();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool is_given = values[i].source == Source::kInput || values[i].source == Source::kCaptured;
    if (is_given && recorded_.tape.is_written(values[i].storage)) written_.push_back(static_cast<int>(i));
  }
  std::vector<bool> made_by_forward(values.size()), read(values.size());
  for (std::size_t i = 0; i < std::min(recorded_.split, calls.size()); ++i) {
    each_slot(calls[i].results, [&](int slot) {
      made_by_forward[at_slot(slot)] =
          values[at_slot(slot)].source == Source::kMade && !hoisted_[at_slot(slot)];
    });
  }
  for (std::size_t i = recorded_.split; i < calls.size(); ++i) {
    each_slot(calls[i].inputs, [&](int slot) { read[at_slot(slot)] = true; });
  }
  for (const int slot : recorded_.gradients) {
    if (slot >= 0) read[at_slot(slot)] = true;
  }
  std::unordered_set<int> tangents(recorded_.tangents.begin(), recorded_.tangents.end());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!read[i] || tangents.count(static_cast<int>(i)) != 0) continue;
    if (made_by_forward[i]) {
      saved_.push_back(static_cast<int>(i));
    } else if (values[i].source == Source::kInput || values[i].source == Source::kCaptured) {
      read_by_backward_.push_back(static_cast<int>(i));
    }
  }
}

// The last step of forward, and of backward, that uses a value lets it go, but for what is handed out.
void Program::plan_lives() {
  const auto& values = recorded_.tape.values();
  std::vector<bool> kept(values.size());
  const auto keep = [&](const std::vector<int>& slots) {
    for (const int slot : slots) {
      if (slot >= 0) kept[at_slot(slot)] = true;
    }
  };
  const auto plan_part = [&](std::size_t begin, std::size_t end) {
    std::vector<bool> seen(values.size());
    for (std::size_t i = end; i-- > begin;) {
      Step& step = steps_[i];
      const auto last = [&](int slot) {
        if (hoisted_[at_slot(slot)] || seen[at_slot(slot)]) return;
        seen[at_slot(slot)] = true;
        if (!kept[at_slot(slot)]) step.drop.push_back(slot);
      };
      if (step.view != kUndefined) {
        last(step.view);
        last(step.view_of);
      } else {
        each_slot(recorded_.tape.calls()[step.call].inputs, last);
        each_slot(recorded_.tape.calls()[step.call].results, last);
      }
    }
  };
  keep(recorded_.gradients);
  plan_part(split_, steps_.size());
  kept.assign(values.size(), false);
  keep(recorded_.outputs);
  keep(recorded_.inputs);
  keep(saved_);
  if (!recorded_.has_backward) keep(recorded_.gradients);
  plan_part(0, split_);
}

bool Program::captured_in_place() const {
  return std::all_of(homes_.begin(), homes_.end(), [](const auto& home) {
    return home.first.storage().unsafeGetStorageImpl() == home.second;
  });
}

std::unique_ptr<Frame> Program::borrow() const {
  {
    const std::lock_guard lock(mutex_);
    if (!frames_.empty()) {
      auto frame = std::move(frames_.back());
      frames_.pop_back();
      return frame;
    }
  }
  auto frame = std::make_unique<Frame>();
  frame->values = fixed_;
  return frame;
}

void Program::give_back(std::unique_ptr<Frame> frame) const {
  for (const std::vector<int>* slots :
       {&recorded_.inputs, &recorded_.outputs, &saved_, &recorded_.tangents, &recorded_.gradients}) {
    for (const int slot : *slots) {
      if (slot >= 0 && !hoisted_[at_slot(slot)]) frame->values[at_slot(slot)].reset();
    }
  }
  frame->stack.clear();
  const std::lock_guard lock(mutex_);
  frames_.push_back(std::move(frame));
}

at::Tensor Program::view_of(const at::Tensor& base, const Layout& layout, std::int64_t offset) const {
  c10::TensorImpl* const from = base.unsafeGetTensorImpl();
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(from->storage()),
                                                   from->key_set(), from->dtype());
  impl->set_sizes_and_strides(layout.sizes, layout.strides, from->storage_offset() + offset);
  return at::Tensor(std::move(impl));
}

void Program::run_call(const Call& call, Frame& frame, bool find_kernels) const {
  torch::jit::Stack& stack = frame.stack;
  stack.clear();
  auto place = call.inputs.begin();
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    if (place == call.inputs.end() || place->index != i) {
      stack.push_back(call.arguments[i]);
      continue;
    }
    const auto value = [&](int slot) {
      if (slot == kUndefined) return at::Tensor();
      const at::Tensor& tensor = frame.values[at_slot(slot)];
      return place->fresh_handle ? another_handle(tensor) : tensor;
    };
    if (place->kind == Kind::kTensor) {
      stack.emplace_back(value(place->slots.front()));
    } else if (place->kind == Kind::kList) {
      c10::List<at::Tensor> list;
      list.reserve(place->slots.size());
      for (const int slot : place->slots) list.push_back(value(slot));
      stack.emplace_back(std::move(list));
    } else {
      c10::List<std::optional<at::Tensor>> list;
      for (const int slot : place->slots) {
        list.push_back(slot == kUndefined ? std::optional<at::Tensor>() : std::optional(value(slot)));
      }
      stack.emplace_back(std::move(list));
    }
    ++place;
  }
  if (find_kernels || call.keys.empty()) {
    call.op.callBoxed(&stack);
  } else {
    call.op.redispatchBoxed(call.keys, &stack);
  }
  const std::size_t first = stack.size() - call.num_results;
  const auto store = [&](int slot, at::Tensor&& tensor) {
    if (slot >= 0 && !hoisted_[at_slot(slot)] &&
        recorded_.tape.values()[at_slot(slot)].source == Source::kMade) {
      frame.values[at_slot(slot)] = std::move(tensor);
    }
  };
  for (const TensorPlace& result : call.results) {
    c10::IValue& value = stack[first + result.index];
    if (result.kind == Kind::kTensor) {
      store(result.slots.front(), std::move(value).toTensor());
    } else {
      Tensors tensors = value.toTensorVector();
      for (std::size_t i = 0; i < tensors.size(); ++i) store(result.slots[i], std::move(tensors[i]));
    }
  }
  stack.clear();
}

void Program::run(Frame& frame, std::size_t begin, std::size_t end) const {
  const at::AutoDispatchBelowADInplaceOrView below;
  // Within a RandomScope operators are looked up anew, so that they meet its key.
  const bool find_kernels = c10::impl::tls_is_dispatch_key_included(kRandomKey);
  std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast;
  if (find_kernels) no_autocast.emplace(kAutocastKeys);
  Modes modes;
  const auto& calls = recorded_.tape.calls();
  for (std::size_t i = begin; i < end; ++i) {
    const Step& step = steps_[i];
    if (step.view != kUndefined) {
      frame.values[at_slot(step.view)] =
          view_of(frame.values[at_slot(step.view_of)], recorded_.tape.values()[at_slot(step.view)].layout,
                  step.offset);
    } else {
      const Call& call = calls[step.call];
      if (!find_kernels) modes.set(call.grad_mode, call.below_autocast);
      run_call(call, frame, find_kernels);
    }
    for (const int slot : step.drop) frame.values[at_slot(slot)].reset();
  }
}

void Program::forward(Frame& frame) const {
  run(frame, 0, split_);
}

void Program::backward(Frame& frame) const {
  run(frame, split_, steps_.size());
}

void Program::bump_versions(const Frame& frame) const {
  for (const int slot : written_) {
    const at::Tensor& tensor = frame.values[at_slot(slot)];
    if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace cohort::script
