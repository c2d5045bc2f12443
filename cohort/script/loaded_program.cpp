// A file holds several programs, one for each recorded size and mode. A call takes the first program that the
// inputs fit: type, sizes, strides, device and shared memory. If several fit, one that was recorded in the
// caller's modes is preferred. Always: captured tensors belong to the program and nobody else has them, so
// they need no guard. Surprising: the caller's autocast is off during the run, since casts of the recording
// are calls on the tape. A call that no program takes is an error that names the input.
#include "cohort/script/loaded_program.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <set>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/script/internal/execute/loaded_recording.h"
#include "cohort/script/internal/execute/replay.h"

namespace cohort::script {
namespace {

using base::concat;

bool is_contiguous(const Layout& layout) {
  std::int64_t expected = 1;
  for (std::size_t i = layout.sizes.size(); i-- > 0;) {
    if (layout.strides[i] != expected) return false;
    expected *= layout.sizes[i];
  }
  return true;
}

std::string describe(const Layout& layout) {
  if (layout.dtype == c10::ScalarType::Undefined) return "undefined";
  std::string text = layout.str();
  if (!layout.device.is_cpu()) text += concat(" on ", layout.device.str());
  if (!is_contiguous(layout)) text += concat(" with strides ", c10::IntArrayRef(layout.strides));
  if (layout.conjugate || layout.negative) text += ", lazily conjugate or negative";
  return text;
}

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  if (tensor.layout() != at::kStrided) return concat("a tensor of layout ", tensor.layout());
  return describe(Layout::of(tensor));
}

// The offset is free: save() rejects tapes that depend on where an input begins in its storage.
bool fits(const Layout& layout, const at::Tensor& tensor) {
  if (!tensor.defined()) return layout.dtype == c10::ScalarType::Undefined;
  return tensor.layout() == at::kStrided && tensor.has_storage() && tensor.scalar_type() == layout.dtype &&
         is_laid_out(tensor, layout) && tensor.device() == layout.device &&
         tensor.is_conj() == layout.conjugate && tensor.is_neg() == layout.negative;
}

}  // namespace

struct LoadedProgram::Impl {
  struct GuardedProgram {
    Environment environment;
    std::shared_ptr<const Program> program;
    std::vector<Layout> inputs;

    explicit GuardedProgram(LoadedRecording recording)
        : environment(recording.environment),
          program(std::make_shared<const Program>(std::move(recording.trace))) {
      for (const int slot : slots()) {
        inputs.push_back(slot == kUndefined ? Layout() : value(slot).layout);
      }
    }
    const std::vector<int>& slots() const { return program->trace().inputs; }
    const Value& value(int slot) const { return program->trace().tape.values()[at_slot(slot)]; }

    // Whether inputs share memory where they did, and nowhere else.
    bool share(const Tensors& given) const {
      for (std::size_t i = 0; i < given.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) {
          if (!given[i].defined() || !given[j].defined()) continue;
          const bool is_shared = value(slots()[i]).storage == value(slots()[j]).storage;
          if (given[i].storage().is_alias_of(given[j].storage()) != is_shared) return false;
          // The tape may read one input through the memory of the other, so their distance must be as
          // recorded.
          const auto distance = [&](std::int64_t a, std::int64_t b) { return a - b; };
          if (is_shared && distance(given[i].storage_offset(), given[j].storage_offset()) !=
                               distance(inputs[i].offset, inputs[j].offset)) {
            return false;
          }
        }
      }
      return true;
    }
    bool takes(const Tensors& given) const {
      return given.size() == inputs.size() &&
             std::equal(
                 given.begin(), given.end(), inputs.begin(),
                 [](const at::Tensor& tensor, const Layout& layout) { return fits(layout, tensor); }) &&
             share(given);
    }
    bool runs_under(const Environment& now) const {
      return environment.autocast == now.autocast && environment.autocast_dtype == now.autocast_dtype &&
             environment.inference == now.inference;
    }
  };

  std::string file;
  Metadata metadata;
  std::vector<GuardedProgram> entries;

  const GuardedProgram* find(const Tensors& inputs) const {
    const GuardedProgram* found = nullptr;
    for (const GuardedProgram& entry : entries) {
      if (!entry.takes(inputs)) continue;
      if (found == nullptr) found = &entry;
      // Only a choice needs the caller's modes: most files hold one program for a size.
      if (entries.size() > 1 && entry.runs_under(Environment::now())) return &entry;
    }
    return found;
  }
  // Says which input no program takes, and what they take.
  std::string misfit(const Tensors& inputs) const;
};

std::string LoadedProgram::Impl::misfit(const Tensors& inputs) const {
  std::vector<const GuardedProgram*> near;
  std::set<std::string> known;
  const auto listed = [&] { return base::join(known, ", or "); };
  for (const GuardedProgram& entry : entries) {
    known.insert(concat(entry.inputs.size()));
    if (entry.inputs.size() == inputs.size()) near.push_back(&entry);
  }
  if (near.empty()) return concat("got ", inputs.size(), " inputs, expected ", listed());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    known.clear();
    for (const GuardedProgram* entry : near) known.insert(describe(entry->inputs[i]));
    const auto takes = [&](const GuardedProgram* entry) { return fits(entry->inputs[i], inputs[i]); };
    if (std::any_of(near.begin(), near.end(), takes)) continue;
    return concat("input ", i, " is ", describe(inputs[i]), "; recorded were ", listed());
  }
  return "each input alone was recorded, but not all together, or other inputs shared memory";
}

LoadedProgram::LoadedProgram(std::string file, Metadata metadata, std::vector<LoadedRecording> recordings) {
  auto impl = std::make_shared<Impl>();
  impl->file = std::move(file);
  impl->metadata = std::move(metadata);
  for (LoadedRecording& recording : recordings) impl->entries.emplace_back(std::move(recording));
  impl_ = std::move(impl);
}

Tensors LoadedProgram::operator()(const Tensors& inputs) const {
  const Impl::GuardedProgram* const entry = impl_->find(inputs);
  if (entry == nullptr) {
    throw UsageError(
        "script.run", concat(impl_->file, ": ", impl_->misfit(inputs)),
        "what was recorded (a part of a batch, contiguous(), clone()), or a file that is saved after "
        "two calls with these inputs");
  }
  // A result without a graph would end a backward here, and nobody would see it.
  const auto needs_gradient = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  if (at::GradMode::is_enabled() && std::any_of(inputs.begin(), inputs.end(), needs_gradient)) {
    throw UsageError("script.run", concat(impl_->file, ": an input needs a gradient, and a file has none"),
                     "detach(), or at::NoGradGuard around the call");
  }
  if (std::any_of(inputs.begin(), inputs.end(), has_tangent)) {
    throw UsageError("script.run",
                     concat(impl_->file, ": an input has a tangent, and a file has no forward-mode AD"),
                     "the function that was saved");
  }
  const c10::ScalarType dtype = c10::get_default_dtype_as_scalartype();
  if (dtype != entry->environment.default_dtype) {
    throw UsageError("script.run", concat(impl_->file, ": the default type is ", dtype, ", and was ",
                                          entry->environment.default_dtype, " when it was recorded"));
  }
  // Operators are looked up anew: casts of autocast that were wanted are calls of their own.
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  return replay(inputs, entry->program);
}

std::vector<std::vector<Layout>> LoadedProgram::inputs() const {
  std::vector<std::vector<Layout>> all;
  for (const Impl::GuardedProgram& entry : impl_->entries) all.push_back(entry.inputs);
  return all;
}

const Metadata& LoadedProgram::metadata() const {
  return impl_->metadata;
}

std::string LoadedProgram::explain() const {
  std::string text = concat(impl_->file, ": ", impl_->entries.size(), " programs\n");
  for (const Impl::GuardedProgram& entry : impl_->entries) {
    base::TextList inputs;
    for (const auto& input : entry.inputs) inputs.add(describe(input));
    text += concat("  inputs: ", inputs.text(), "; ", entry.environment.str(),
                   "\n    program: ", entry.program->trace().tape.calls().size(), " operators recorded, ",
                   entry.program->num_steps(), " run\n");
  }
  return text;
}

}  // namespace cohort::script
