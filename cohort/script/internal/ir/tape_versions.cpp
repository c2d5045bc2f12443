// Who changes the tensors of a recording, by the version counters that autograd keeps. A counter is
// watched from the first use of its tensor, or from watch(). After each call that writes, its version is
// taken as known. A counter that moved by more was moved by another writer. Always: tensors that count
// together, as a tensor and its detach() do, have one entry. The entry holds the counter, so its address
// is not used again. Inference tensors have no counter: who writes to them is not known.
#include <cstring>

#include "cohort/script/internal/ir/tape.h"

namespace cohort::script {
namespace {

// Identity of a counter: VariableVersion is a pointer to it.
const void* address_of(const c10::VariableVersion& version) {
  static_assert(sizeof(version) == sizeof(const void*));
  const void* address = nullptr;
  std::memcpy(&address, static_cast<const void*>(&version), sizeof(address));
  return address;
}

}  // namespace

bool count_together(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_inference() || b.is_inference()) return a.is_same(b);
  return address_of(a.unsafeGetTensorImpl()->version_counter()) ==
         address_of(b.unsafeGetTensorImpl()->version_counter());
}

// Note [Who else writes]
// The other writer is a thread of the function's own, as a rule. Captured tensors may also be changed by
// others that train the same weights (Hogwild!), as a replay reads them where they lie. So such a recording
// is not used, and the function stays eager only if several follow each other: CacheEntry::add_trace().
void Tape::check_version(Version& version) {
  const std::uint32_t now = version.counter.current_version();
  if (now - version.seen > version.writes) {
    if (version.is_captured) {
      captured_was_changed_ = true;
    } else {
      mark_unsupported("a tensor of the function was changed in place, and by no operator of this thread");
    }
  }
  version.seen = now;
  version.writes = 0;
}

Tape::Version& Tape::version_of(const at::Tensor& tensor, bool is_captured) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  const auto [known, is_new] = versions_.try_emplace(address_of(counter));
  if (is_new) {
    known->second = {.counter = counter, .seen = counter.current_version(), .is_captured = is_captured};
  }
  return known->second;
}

void Tape::watch(const at::Tensor& captured) {
  if (!captured.is_inference()) version_of(captured, /*is_captured=*/true);
}

void Tape::check_version(const at::Tensor& tensor, int slot) {
  const Source source = values_[at_slot(storages_[values_[at_slot(slot)].storage].first)].source;
  if (source == Source::kConstant || tensor.is_inference()) return;
  check_version(version_of(tensor, source == Source::kCaptured));
}

void Tape::check_versions() {
  for (auto& [address, version] : versions_) check_version(version);
  versions_.clear();
}

// What a kernel writes to a captured tensor without a word in its schema is the operator's own, and replayed.
void Tape::absorb_versions(const OperatorCall& call) {
  for (const TensorPlace& place : call.inputs) {
    for (const int slot : place.slots) {
      if (slot < 0 || values_[at_slot(slot)].source != Source::kCaptured) continue;
      const at::Tensor& tensor = values_[at_slot(slot)].tensor;
      if (tensor.is_inference()) continue;
      const auto known = versions_.find(address_of(tensor.unsafeGetTensorImpl()->version_counter()));
      if (known != versions_.end()) known->second.seen = known->second.counter.current_version();
    }
  }
}

void Tape::mark_written(const std::vector<Written>& written) {
  for (const Written& each : written) {
    Storage& storage = storages_[values_[static_cast<std::size_t>(each.slot)].storage];
    storage.written = true;
    if (each.is_overwritten) mark_filled(each.slot, each.tensor);
    if (each.tensor.is_inference()) continue;
    // Autograd counts this write at the operator's end; operators within the kernel have counted before.
    const c10::VariableVersion& counter = each.tensor.unsafeGetTensorImpl()->version_counter();
    const auto known = versions_.find(address_of(counter));
    if (known == versions_.end()) continue;
    known->second.seen = counter.current_version();
    ++known->second.writes;
  }
}

}  // namespace cohort::script
