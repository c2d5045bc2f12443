// Texts differ in length, and collectives want tensors of one shape. So lengths travel first, as numbers;
// then each rank pads its text to the longest. Always: all collectives of a call share its one deadline, so
// together they take no longer than a single call may. require_same() compares every text with rank 0's on
// every rank, so all ranks throw the same error, or none.
#include "cohort/comm/text_collectives.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/comm/internal/group_state.h"

namespace cohort::comm {
namespace {

// What several collectives have together.
class OneDeadline {
 public:
  OneDeadline(const Group& group, CallOptions options)
      : deadline_(options.timeout.count() == 0 ? group.timeout() : options.timeout),
        group_(group.shared_state()) {
    if (group_ != nullptr) group_->shares_time = options.timeout.count() == 0;
  }
  ~OneDeadline() {
    if (group_ != nullptr) group_->shares_time = false;
  }
  OneDeadline(const OneDeadline&) = delete;
  OneDeadline& operator=(const OneDeadline&) = delete;
  CallOptions left() const { return {std::chrono::milliseconds(std::max(1, deadline_.remaining_ms()))}; }

 private:
  base::Deadline deadline_;
  const std::shared_ptr<GroupState> group_;
};

// The first line in which two texts differ, or "nothing" where one has ended.
std::pair<std::string, std::string> first_difference(std::string_view a, std::string_view b) {
  const auto next_line = [](std::string_view& text) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string line = text.empty() ? "nothing" : "'" + std::string(text.substr(0, end)) + "'";
    text.remove_prefix(std::min(end + 1, text.size()));
    return line;
  };
  while (true) {
    std::string of_a = next_line(a);
    std::string of_b = next_line(b);
    if (of_a != of_b || (a.empty() && b.empty())) return {std::move(of_a), std::move(of_b)};
  }
}

}  // namespace

std::string broadcast_text(const Group& group, const std::string& text, int root, CallOptions options) {
  const OneDeadline until(group, options);
  at::Tensor length = at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong);
  group.broadcast(length, root, until.left()).wait();
  at::Tensor bytes = at::empty({length.item<std::int64_t>()}, at::kByte);
  if (group.rank() == root && !text.empty()) {
    std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  }
  // Every rank knows the length by now, so all leave out an empty one.
  if (bytes.numel() > 0) group.broadcast(bytes, root, until.left()).wait();
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<std::size_t>(bytes.numel())};
}

std::vector<std::int64_t> all_gather_number(const Group& group, std::int64_t number, CallOptions options) {
  at::Tensor all = at::empty({group.size()}, at::kLong);
  group.all_gather(all, at::full({1}, number, at::kLong), options).wait();
  const auto* const numbers = all.const_data_ptr<std::int64_t>();
  return {numbers, numbers + group.size()};
}

std::vector<std::string> all_gather_text(const Group& group, const std::string& text, CallOptions options) {
  const OneDeadline until(group, options);
  const std::vector<std::int64_t> lengths =
      all_gather_number(group, static_cast<std::int64_t>(text.size()), until.left());
  const std::int64_t longest = std::max<std::int64_t>(1, *std::ranges::max_element(lengths));
  at::Tensor padded = at::zeros({longest}, at::kByte);
  std::memcpy(padded.mutable_data_ptr(), text.data(), text.size());
  at::Tensor all = at::empty({group.size() * longest}, at::kByte);
  group.all_gather(all, padded, until.left()).wait();
  std::vector<std::string> texts;
  for (int rank = 0; rank < group.size(); ++rank) {
    texts.emplace_back(static_cast<const char*>(all.const_data_ptr()) + rank * longest,
                       static_cast<std::size_t>(lengths[static_cast<std::size_t>(rank)]));
  }
  return texts;
}

void require_same(const Group& group, const std::string& what, const std::string& text, CallOptions options) {
  const std::vector<std::string> texts = all_gather_text(group, text, options);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    const auto [first, other] = first_difference(texts[0], texts[rank]);
    throw UsageError("comm.require_same",
                     base::concat(what, " is not the same on all ranks: rank 0 has ", first, ", rank ", rank,
                                  " has ", other),
                     "start all ranks with the same program, configuration and data");
  }
}

}  // namespace cohort::comm
