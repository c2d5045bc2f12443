// What stages, placements and options must have in common, checked when a pipeline is made. check_options()
// comes before anything else, and check_tied() after the stages have moved to their devices. An error names
// the stage or the placement. Over ranks, each rank checks what it sees: a remote stage has no layers here.
// Always: what could make a plan wrong is rejected here, so that a step checks its batch alone.
#include "cohort/pipeline/internal/check.h"

#include <algorithm>
#include <unordered_map>

#include "cohort/base/error.h"

namespace cohort::pipeline {
namespace {

using base::concat;
constexpr const char* kWhereCheck = "pipeline.Pipeline";

}  // namespace

void check_options(const std::vector<Stage>& stages, const PipelineOptions& options) {
  if (stages.empty()) throw UsageError(kWhereCheck, "got no stages, expected at least one");
  if (options.placements.empty()) {
    throw UsageError(kWhereCheck, "got no placements, expected one for each stage",
                     "{.placements = base::parse_placements(\"cpu:0,cpu:1\")}");
  }
  if ((options.num_micro_batches > 0) == (options.split_size > 0)) {
    throw UsageError(kWhereCheck,
                     concat("got num_micro_batches = ", options.num_micro_batches,
                            " and split_size = ", options.split_size, ", expected one of them above 0"));
  }
  for (const Skip& skip : options.skips) {
    const int num_stages = static_cast<int>(stages.size());
    // The next stage gets every output anyway.
    if (skip.from < 0 || skip.output < 0 || skip.to >= num_stages || skip.to < skip.from + 2) {
      throw UsageError(kWhereCheck,
                       concat("got a skip of output ", skip.output, " from stage ", skip.from, " to stage ",
                              skip.to, ", expected one that passes a stage, of ", num_stages));
    }
  }
  if (options.group && options.placements.size() != static_cast<std::size_t>(options.group.size())) {
    throw UsageError(kWhereCheck,
                     concat("got ", options.placements.size(), " placements, expected one for each of the ",
                            options.group.size(), " ranks"));
  }
  // Placements take turns by a lock, and ranks share none.
  if (options.run_ahead >= static_cast<int>(options.placements.size()) ||
      (options.run_ahead >= 0 && options.group)) {
    throw UsageError(kWhereCheck, concat("got run_ahead = ", options.run_ahead, ", expected one of ",
                                         options.placements.size(), " placements of one process"));
  }
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const bool is_mine =
        !options.group || static_cast<int>(i % options.placements.size()) == options.group.rank();
    if (stages[i].is_remote() && is_mine) {
      throw UsageError(kWhereCheck, concat("stage ", i, " is on this rank, got Stage::remote()"));
    }
  }
  if (!schedule_type(options.schedule).splits_backward) return;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const Stage& stage = stages[i];
    if (stage.is_remote()) continue;
    if (stage.recomputes()) {
      throw UsageError(
          kWhereCheck,
          concat("stage ", i, " (", stage.name(), ") is recomputed, so ", to_string(options.schedule),
                 " cannot split its backward into input and weight gradients"),
          "schedule 1f1b with recomputation");
    }
  }
}

void check_distinct(const PipelineOptions& options) {
  if (options.group) return;
  const auto& placements = options.placements;
  for (auto each = placements.begin(); each != placements.end(); ++each) {
    if (std::find(placements.begin(), each, *each) == each) continue;
    throw UsageError(kWhereCheck, concat("placement ", each->name, " stands twice, for one thread"),
                     concat(each->name, "/a and ", each->name, "/b, which share the cores"));
  }
}

void check_tied(const Setup& setup) {
  std::unordered_map<const at::TensorImpl*, int> owner;
  for (int stage = 0; stage < static_cast<int>(setup.stages.size()); ++stage) {
    for (const at::Tensor& parameter : setup.stages[static_cast<std::size_t>(stage)].parameters()) {
      const auto [found, fresh] = owner.emplace(parameter.unsafeGetTensorImpl(), stage);
      const auto device = [&](int of) {
        return setup.devices[static_cast<std::size_t>(setup.placement_of(of))];
      };
      // Both stages add to one grad(), which lies on one device.
      if (fresh || device(found->second) == device(stage)) continue;
      throw UsageError(kWhereCheck,
                       concat("stages ", found->second, " and ", stage, " share a parameter, but are on ",
                              device(found->second), " and ", device(stage)),
                       "placements of one device for stages with tied parameters");
    }
  }
}

}  // namespace cohort::pipeline
