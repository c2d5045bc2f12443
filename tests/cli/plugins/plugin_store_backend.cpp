// A backend for tensors on the CPU, over the key-value store of the job. A rank writes its tensor into the
// store and reads those of the other ranks. Calls end before they return, so their work is complete.
#include <cohort/comm/backend.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

struct CompletedWork : c10d::Work {
  CompletedWork() { finish(); }
};

class StoreBackend : public c10d::Backend {
 public:
  explicit StoreBackend(cohort::comm::BackendOptions options)
      : Backend(options.rank, options.size), options_(std::move(options)) {}
  const std::string getBackendName() const override { return "over_store"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& call) override {
    const bool is_sum = call.reduceOp == c10d::ReduceOp::SUM;
    TORCH_CHECK(is_sum || call.reduceOp == c10d::ReduceOp::MAX, "over_store has only sums and maxima");
    const Tensors all = exchange(tensors.at(0), call.timeout);
    at::Tensor result = all[0];
    // In the order of ranks, so that all ranks get the same bits.
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      result = is_sum ? result + all[rank] : at::maximum(result, all[rank]);
    }
    tensors[0].copy_(result);
    return c10::make_intrusive<CompletedWork>();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& call) override {
    const auto root = static_cast<std::size_t>(call.rootRank);
    tensors.at(0).copy_(exchange(tensors.at(0), call.timeout).at(root));
    return c10::make_intrusive<CompletedWork>();
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& call) override {
    output.view({-1}).copy_(at::cat(exchange(input.view({-1}), call.timeout)));
    return c10::make_intrusive<CompletedWork>();
  }

  WorkPtr barrier(const c10d::BarrierOptions& call) override {
    exchange(at::zeros({1}), call.timeout);
    return c10::make_intrusive<CompletedWork>();
  }

 private:
  // Returns the tensor of each rank, in the order of ranks. Shape and type are equal on all ranks.
  Tensors exchange(const at::Tensor& tensor, std::chrono::milliseconds timeout) {
    const std::uint64_t call = num_calls_++;
    const auto* const data = static_cast<const std::uint8_t*>(tensor.const_data_ptr());
    options_.store->set(key_of(call, options_.rank), std::vector<std::uint8_t>(data, data + tensor.nbytes()));
    std::vector<std::string> keys;
    for (int rank = 0; rank < options_.size; ++rank) keys.push_back(key_of(call, rank));
    // On a connection of its own, since the group may ask the store meanwhile. Throws at the timeout.
    options_.connections->wait(options_.prefix, keys, timeout.count() > 0 ? timeout : options_.timeout);
    Tensors all;
    for (const std::string& key : keys) {
      const std::vector<std::uint8_t> bytes = options_.store->get(key);
      TORCH_CHECK(bytes.size() == tensor.nbytes(), "ranks gave tensors of different sizes");
      all.push_back(at::empty_like(tensor));
      if (!bytes.empty()) std::memcpy(all.back().mutable_data_ptr(), bytes.data(), bytes.size());
    }
    // All ranks have begun this call, so all have read the key of the call before.
    if (call > 0) options_.store->deleteKey(key_of(call - 1, options_.rank));
    return all;
  }
  static std::string key_of(std::uint64_t call, int rank) {
    return std::to_string(call) + "/" + std::to_string(rank);
  }

  const cohort::comm::BackendOptions options_;
  std::uint64_t num_calls_ = 0;
};

COHORT_REGISTER_BACKEND("over_store", {.make = [](const cohort::comm::BackendOptions& options) {
                          return cohort::comm::BackendInstance{
                              .backend = c10::make_intrusive<StoreBackend>(options),
                              .deterministic_rank_order = true};
                        }});

}  // namespace
