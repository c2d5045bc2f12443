#include "cohort/parallel/virtual_ranks/slice_exchange.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "cohort/base/error.h"

namespace cohort::parallel {
namespace {

class GroupExchange : public SliceExchange {
 public:
  explicit GroupExchange(comm::Group group) : group_(std::move(group)) {
    if (!group_) throw UsageError("parallel.slice_exchange", "this process is not in the group");
  }
  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }

  Transfer all_to_all(at::Tensor output, const at::Tensor& input,
                      const std::vector<std::int64_t>& output_bytes,
                      const std::vector<std::int64_t>& input_bytes) override {
    return transfer_of(group_.all_to_all(output, input, output_bytes, input_bytes));
  }
  Transfer all_gather(at::Tensor output, const at::Tensor& input) override {
    return transfer_of(group_.all_gather(output, input));
  }
  at::Tensor empty(std::int64_t numel, const at::TensorOptions& options) override {
    return group_.empty({numel}, options);
  }
  Transfer broadcast(at::Tensor bytes) override { return transfer_of(group_.broadcast(bytes, 0)); }

 private:
  static Transfer transfer_of(comm::Pending pending) {
    // A function can be copied, and a Pending cannot.
    return [shared = std::make_shared<comm::Pending>(std::move(pending))] { shared->wait(); };
  }

  comm::Group group_;
};

}  // namespace

at::Tensor SliceExchange::empty(std::int64_t numel, const at::TensorOptions& options) {
  return at::empty({numel}, options);
}

std::shared_ptr<SliceExchange> make_slice_exchange(comm::Group group) {
  return std::make_shared<GroupExchange>(std::move(group));
}

}  // namespace cohort::parallel
