// agree_on() begins an all-reduce of this rank's requests, and returns the result of the call before. All
// ranks have the same answer at the same step, and the reduction has a whole step to end. Sums of metrics
// travel by name, because a rank may not know all names. They are not rounded, so their order does not
// matter. Rank 0 alone reads a checkpoint: its layout travels as an object, then each tensor.
#include "cohort/train/internal/fit/group_coordinator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <nlohmann/json.hpp>

#include "cohort/base/timeline.h"
#include "cohort/comm/object_collectives.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/comm/trace.h"
#include "cohort/train/internal/fit/state_numbers.h"

namespace cohort::train {
namespace {

using nlohmann::json;

json layout_of(const checkpoint::TensorMap& tensors) {
  json layout = json::array();
  for (const auto& [name, tensor] : tensors) {
    // The number of a type is that of this LibTorch; all ranks of a job have the same.
    layout.push_back({name, static_cast<int>(tensor.scalar_type()), tensor.sizes().vec()});
  }
  return layout;
}

checkpoint::TensorMap empty_tensors(const json& layout) {
  checkpoint::TensorMap tensors;
  for (const json& entry : layout) {
    tensors.emplace_back(entry.at(0), at::empty(entry.at(2).get<std::vector<std::int64_t>>(),
                                                static_cast<at::ScalarType>(entry.at(1).get<int>())));
  }
  return tensors;
}

}  // namespace

void GroupCoordinator::step_done() const {
  if (group_ != nullptr) group_->step_done();
}

void GroupCoordinator::write_trace(const std::filesystem::path& path) const {
  if (size() == 1) {
    base::Timeline::write(path);
  } else {
    comm::write_trace(*group_, path);
  }
}

void GroupCoordinator::require_same(const std::string& what, const std::string& text) {
  if (size() > 1) comm::require_same(*group_, what, text);
}

RankCoordinator::ControlRequests GroupCoordinator::agree_on(const ControlRequests& requests) {
  if (size() == 1) return requests;
  ControlRequests agreed;
  // The first call has nothing to answer. A request is heard one step late, and by all ranks at once.
  if (reduced_requests_.defined()) {
    reduction_.wait();
    const std::int64_t* const words = reduced_requests_.const_data_ptr<std::int64_t>();
    agreed = {static_cast<int>(words[0]), words[1] != 0, words[2] != 0};
  }
  reduced_requests_ = at::tensor(
      {std::int64_t{requests.stop_signal}, std::int64_t{requests.save_now}, std::int64_t{requests.save_due}},
      at::kLong);
  // The maximum: one rank's request is enough, and of two signals all take the same.
  reduction_ = group_->all_reduce(reduced_requests_, comm::ReduceOp::MAX);
  return agreed;
}

RankCoordinator::MetricSums GroupCoordinator::total(MeterSet& meters) const {
  if (size() == 1) return meters.sums();
  // By name, as a rank without a sample so far does not know the names.
  json own_sums = json::object();
  for (const auto& [name, sum] : meters.sums()) own_sums[name] = sum_to_json(sum);
  std::map<std::string, std::pair<ExactSum, double>> exact;
  for (const json& sums : comm::all_gather_object(*group_, own_sums)) {
    for (const auto& [name, values] : sums.items()) {
      const MeterSet::Sum sum = sum_from_json(values);
      exact[name].first.add(sum.exact());
      exact[name].second += sum.weight;
    }
  }
  MetricSums total;
  for (const auto& [name, sum] : exact) total[name] = MeterSet::Sum::of(sum.first, sum.second);
  return total;
}

double GroupCoordinator::mean(double value) const {
  if (size() == 1) return value;
  at::Tensor tensor = at::tensor({value}, at::kDouble);
  group_->all_reduce(tensor).wait();
  return tensor.item<double>() / size();
}

void GroupCoordinator::run_on_first(const std::function<void()>& fn) const {
  if (size() == 1) return fn();
  comm::run_on_rank0_and_broadcast(*group_, [&] {
    fn();
    return json();
  });
}

std::optional<checkpoint::LoadedCheckpoint> GroupCoordinator::load(
    const std::function<std::optional<checkpoint::LoadedCheckpoint>()>& load) const {
  std::optional<checkpoint::LoadedCheckpoint> loaded;
  // What rank 0 cannot read is an error of all ranks at once: they would wait for it in share().
  run_on_first([&] { loaded = load(); });
  return share(std::move(loaded));
}

// Gives every rank what rank 0 has loaded, or found not to be there.
std::optional<checkpoint::LoadedCheckpoint> GroupCoordinator::share(
    std::optional<checkpoint::LoadedCheckpoint> loaded) const {
  if (size() == 1) return loaded;
  json head;
  if (loaded) {
    head = {{"folder", loaded->folder.string()},
            {"model", layout_of(loaded->content.model)},
            {"optimizer", layout_of(loaded->content.optimizer)},
            {"state", loaded->content.state}};
  }
  // Null says that there is no checkpoint, which the other ranks could not see.
  head = comm::broadcast_object(*group_, head);
  if (head.is_null()) return std::nullopt;
  if (!is_first()) {
    loaded = {.folder = head.at("folder").get<std::string>(),
              .content = {.model = empty_tensors(head.at("model")),
                          .optimizer = empty_tensors(head.at("optimizer")),
                          .state = head.at("state")}};
  }
  for (checkpoint::TensorMap* tensors : {&loaded->content.model, &loaded->content.optimizer}) {
    for (auto& [name, tensor] : *tensors) {
      // In the order of the layout, one at a time: no rank needs memory for a second copy.
      if (tensor.numel() > 0) group_->broadcast(tensor, 0).wait();
    }
  }
  return loaded;
}

}  // namespace cohort::train
