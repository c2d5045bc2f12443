// What must be equal goes into one hash, which is compared; the text beside it only serves the message. The
// rows of all_to_all differ from rank to rank, so they cannot be in that hash. Instead each triple (from, to,
// rows) is hashed alone. The ranks add up what they send and what they receive: over all ranks both sums are
// equal where rows match. Always: each rank judges the same fingerprints, so all ranks throw, or none does.
#include "cohort/comm/internal/consistency_check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/comm/internal/deadline_store.h"
#include "cohort/comm/internal/missing_ranks.h"
#include "cohort/comm/store_adapter.h"
#include "cohort/core/torch_compat.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

// FNV-1a, by words.
class Hash {
 public:
  Hash& add(std::uint64_t word) {
    for (int byte = 0; byte < 8; ++byte, word >>= 8) value_ = (value_ ^ (word & 0xFF)) * 0x100000001b3ULL;
    return *this;
  }
  Hash& add(std::int64_t number) { return add(static_cast<std::uint64_t>(number)); }
  Hash& add(const char* text) {
    for (const char c : std::string_view(text == nullptr ? "" : text)) {
      add(static_cast<std::uint64_t>(static_cast<unsigned char>(c)));
    }
    // An end that no character has: "ab", "c" and "a", "bc" differ.
    return add(std::uint64_t{0x100});
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325ULL;
};

// Summed up modulo 2^64, so the order of ranks does not matter.
std::uint64_t traffic(int from, int to, std::int64_t rows) {
  return Hash().add(std::int64_t{from}).add(std::int64_t{to}).add(rows).value();
}

milliseconds left(base::Deadline deadline) {
  return milliseconds(std::max(1, deadline.remaining_ms()));
}

}  // namespace

Fingerprint make_fingerprint(const GroupState& group, const Signature& signature,
                             const CallDetails& details) {
  Fingerprint fingerprint;
  fingerprint.steps = group.steps.load();
  Hash hash;
  hash.add(signature.call).add(signature.number).add(fingerprint.steps).add(signature.op);
  hash.add(std::int64_t{signature.peer}).add(static_cast<std::uint64_t>(details.tensors.size()));
  for (const at::Tensor& tensor : details.tensors) {
    hash.add(static_cast<std::int64_t>(tensor.scalar_type())).add(tensor.dim());
    for (std::int64_t dim = details.from_dim; dim < tensor.dim(); ++dim) hash.add(tensor.size(dim));
  }
  fingerprint.hash = hash.value();
  for (std::size_t i = 0; i < details.in_rows.size(); ++i) {
    fingerprint.sends += traffic(group.rank, static_cast<int>(i), details.in_rows[i]);
    fingerprint.receives += traffic(static_cast<int>(i), group.rank, details.out_rows[i]);
  }
  std::string text = signature.text();
  if (!details.in_rows.empty()) {
    text += base::concat(" rows ", base::join(details.in_rows, "+"), " out, ",
                         base::join(details.out_rows, "+"), " in");
  }
  // Fingerprints have one size on all ranks; what is cut off is still in the hash.
  if (text.size() >= fingerprint.text.size())
    text.replace(fingerprint.text.size() - 4, std::string::npos, "...");
  std::memcpy(fingerprint.text.data(), text.c_str(), text.size() + 1);
  return fingerprint;
}

std::vector<Fingerprint> gather_over_backend(GroupState& group, const Fingerprint& fingerprint,
                                             base::Deadline deadline) {
  const at::NoGradGuard no_grad;
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(Fingerprint));
  at::Tensor from = at::empty({kSize}, at::kByte), to = at::empty({group.size * kSize}, at::kByte);
  std::memcpy(from.mutable_data_ptr(), &fingerprint, sizeof(Fingerprint));
  c10d::AllgatherOptions settings;
  settings.timeout = left(deadline);
  if (!group.group->COHORT_C10D_ALL_GATHER(to, from, settings)->wait(left(deadline))) {
    throw std::runtime_error("the comparison was aborted");
  }
  std::vector<Fingerprint> all(static_cast<std::size_t>(group.size));
  std::memcpy(all.data(), to.const_data_ptr(), all.size() * sizeof(Fingerprint));
  return all;
}

// A rank that has come to comparison n has read all of comparison n - 1, so that all have read n - 2.
std::vector<Fingerprint> gather_over_store(GroupState& group, const Fingerprint& fingerprint,
                                           base::Deadline deadline) {
  const std::int64_t round = group.compared.fetch_add(1);
  const auto key = [](std::int64_t number) { return base::concat("check/", number); };
  const StoreDeadline until(deadline.later(kLastAnswerTime));
  StoreAdapter kv_store = store_adapter_of(group);
  const std::string bytes(reinterpret_cast<const char*>(&fingerprint), sizeof(Fingerprint));
  const base::Words words = gather_words(kv_store, key(round), group.rank, group.size, bytes, deadline);
  if (!words.missing.empty()) {
    throw MissingRanks<TimeoutError>(
        words.missing, "comm.check_consistency",
        base::concat("timed out: ", base::format_list("rank", words.missing), " did not come"));
  }
  std::vector<Fingerprint> all(static_cast<std::size_t>(group.size));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (words.of_rank[rank].size() != sizeof(Fingerprint)) {
      throw std::runtime_error("a fingerprint of another size");
    }
    std::memcpy(&all[rank], words.of_rank[rank].data(), sizeof(Fingerprint));
  }
  if (round >= 2) base::remove_word(kv_store, key(round - 2), group.rank);
  return all;
}

std::vector<Fingerprint> gather_fingerprints(GroupState& group, const Fingerprint& fingerprint,
                                             base::Deadline deadline) {
  return group.device == c10::kCPU ? gather_over_backend(group, fingerprint, deadline)
                                   : gather_over_store(group, fingerprint, deadline);
}

void compare_calls(const GroupState& group, const std::vector<Fingerprint>& all) {
  bool alike = true, same_text = true, same_steps = true;
  std::uint64_t sends = 0, receives = 0;
  for (const Fingerprint& theirs : all) {
    alike = alike && theirs.hash == all[0].hash;
    same_text = same_text && theirs.text == all[0].text;
    same_steps = same_steps && theirs.steps == all[0].steps;
    sends += theirs.sends;
    receives += theirs.receives;
  }
  if (alike && sends == receives) return;
  std::vector<std::pair<std::string, std::vector<int>>> calls;  // who called what, in the order of ranks
  for (int rank = 0; rank < group.size; ++rank) {
    const Fingerprint& theirs = all[static_cast<std::size_t>(rank)];
    std::string text(theirs.text.data());
    if (!same_steps) text += base::concat(" after ", theirs.steps, " steps");
    const auto found = std::ranges::find(calls, text, &decltype(calls)::value_type::first);
    if (found == calls.end()) {
      calls.emplace_back(text, std::vector<int>{rank});
    } else {
      found->second.push_back(rank);
    }
  }
  base::TextList called("; ");
  for (const auto& [text, ranks] : calls) called.add(base::format_list("rank", ranks), ": ", text);
  std::string list = called.text();
  // Equal texts with different hashes: the difference lies beyond what a text shows.
  if (same_text && same_steps) list += alike ? " (rows do not match)" : " (shapes differ further on)";
  const char* hint = same_steps ? "every rank makes the same calls, with the same shapes, in the same order"
                                : "call step_done() on every rank, or on none";
  throw UsageError("comm.check_consistency",
                   base::concat("ranks of group '", group.name, "' call different things: ", list), hint);
}

}  // namespace cohort::comm
