#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "cohort/comm/backend.h"

/// What a backend over the job's key-value store is made of: slow, and a few lines long.
namespace cohort::test {

/// The work of a call that is over.
struct CompletedWork : c10d::Work {
  CompletedWork() { finish(); }
};

/// Exchanges tensors of one shape and type through the store. Threads: one call at a time.
class StoreExchange {
 public:
  explicit StoreExchange(comm::BackendOptions options) : options_(std::move(options)) {}

  /// Returns what each rank gave, in the order of ranks. Collective: blocks until all ranks have given
  /// theirs. `timeout`: of this call; not more than 0: the group's. Throws: what the store throws.
  std::vector<at::Tensor> exchange(const at::Tensor& tensor, std::chrono::milliseconds timeout) {
    const std::uint64_t call = num_calls_++;
    const auto* const data = static_cast<const std::uint8_t*>(tensor.const_data_ptr());
    options_.store->set(key_of(call, options_.rank), std::vector<std::uint8_t>(data, data + tensor.nbytes()));
    std::vector<std::string> keys;
    for (int rank = 0; rank < options_.size; ++rank) keys.push_back(key_of(call, rank));
    // On a connection of its own: the group asks the store while this call waits.
    options_.connections->wait(options_.prefix, keys, timeout.count() > 0 ? timeout : options_.timeout);
    std::vector<at::Tensor> all;
    for (const std::string& key : keys) {
      const std::vector<std::uint8_t> bytes = options_.store->get(key);
      TORCH_CHECK(bytes.size() == tensor.nbytes(), "ranks gave tensors of different sizes");
      all.push_back(at::empty_like(tensor));
      if (!bytes.empty()) std::memcpy(all.back().mutable_data_ptr(), bytes.data(), bytes.size());
    }
    // All ranks have begun this call, so all have read what was given in the call before it.
    if (call > 0) options_.store->deleteKey(key_of(call - 1, options_.rank));
    return all;
  }

 private:
  static std::string key_of(std::uint64_t call, int rank) {
    return std::to_string(call) + "/" + std::to_string(rank);
  }

  const comm::BackendOptions options_;
  std::uint64_t num_calls_ = 0;
};

}  // namespace cohort::test
