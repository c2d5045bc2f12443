// Rank 0 reads what the checkpoint says of its run, and sends it as text, so all ranks decide alike. The
// samples of a step stay, unless the configuration asks for another number; so does a rate that is scaled by
// them. Then the two configurations are compared, and keys that may not change are rejected. A configuration
// that cannot be read is not compared, with a warning.
#include "cohort/train/internal/resume.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/checkpoint/manifest.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/config/keys.h"
#include "cohort/config/resume.h"
#include "cohort/train/batch_plan.h"
#include "cohort/train/internal/distributed_setup.h"
#include "cohort/train/internal/fit/run_state.h"

namespace cohort::train {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

/// What a checkpoint says of the run that made it.
struct Origin {
  std::string checkpoint;
  int world_size = 1;
  int threads = 0;
  std::int64_t global_batch_size = 0;
  std::string config;  // empty: an older version made it
};

/// Null: there is no checkpoint.
json to_json(const std::optional<Origin>& origin) {
  if (!origin) return nullptr;
  return {{"checkpoint", origin->checkpoint},
          {"world_size", origin->world_size},
          {"threads", origin->threads},
          {"global_batch_size", origin->global_batch_size},
          {"config", origin->config}};
}

std::optional<Origin> origin_from(const json& object) {
  if (object.is_null()) return std::nullopt;
  return Origin{.checkpoint = object.at("checkpoint"),
                .world_size = object.at("world_size"),
                .threads = object.at("threads"),
                .global_batch_size = object.at("global_batch_size"),
                .config = object.at("config")};
}

Origin read_origin(const fs::path& checkpoint) {
  const RunState state = run_of(checkpoint::read_manifest(checkpoint).state);
  return {checkpoint.string(), state.world_size, state.threads, state.global_batch_size, state.description};
}

std::optional<Origin> find_origin(const std::string& resume, const fs::path& folder) {
  const auto found = checkpoint::RunCheckpoints(folder / "checkpoints").find(resume);
  return found ? std::optional(read_origin(*found)) : std::nullopt;
}

/// The configuration of `origin`, where there is one that this version can read.
std::optional<config::Config> config_of(const Origin& origin, bool logs) {
  std::string why = "the checkpoint does not hold it";
  try {
    if (!origin.config.empty())
      return config::load_written_config_text(origin.config, origin.checkpoint + "/state.json");
  } catch (const ConfigError& error) {
    why = error.what();
  }
  if (logs) {
    base::log_warning(
        base::concat("the configuration that made ", origin.checkpoint, " is not compared: ", why));
  }
  return std::nullopt;
}

/// Returns whether a step has as many samples as in `origin`; makes it so unless `train` asks for others.
/// `before`: null where it is not known.
bool keep_step(config::TrainConfig& train, const Origin& origin, const config::TrainConfig* before,
               const parallel::GradientSync& gradient_sync) {
  if (global_batch_size(train, gradient_sync.shares().of) == origin.global_batch_size) return true;
  const bool changed = train.global_batch_size > 0 ||
                       (before != nullptr &&
                        (train.batch_size != before->batch_size || train.accumulate != before->accumulate));
  if (changed || (before == nullptr && gradient_sync.size() == origin.world_size)) return false;
  train.global_batch_size = origin.global_batch_size;
  if (gradient_sync.rank() == 0) {
    base::log_info(base::concat("the run was made by ", base::format_count(origin.world_size, "rank"),
                                ", and continues with ", gradient_sync.size(), ": a step keeps its ",
                                origin.global_batch_size, " samples"));
  }
  return true;
}

/// A rate that is scaled is that of the samples of a step, which stay, over those that optim.lr is for:
/// `base_size` then, `before` was scaled so.
void keep_rate(config::OptimConfig& optim, const config::TrainConfig& train,
               const config::OptimConfig& before, std::int64_t base_size) {
  if (optim.lr_base_size > 0 || optim.lr_scaling == "none" || before.lr_scaling == "none") return;
  if (lr_base_size(optim, train) != base_size) optim.lr_base_size = base_size;
}

/// True where an epoch is evaluated as `before` did, with `ranks_before`, on the same data: which data it is
/// Trainer finds out.
bool evaluates_as(config::Config before, int ranks_before, config::Config now, int ranks) {
  static constexpr std::array kKeys = {
      "data.val_transforms",  "data.mean", "data.std", "data.options", "train.max_eval_steps",
      "train.label_smoothing"};
  // So many batches are not the same samples in batches of another size.
  const bool same_batches =
      global_evaluation_size(before.train, num_shares(before.distributed, ranks_before)) ==
      global_evaluation_size(now.train, num_shares(now.distributed, ranks));
  if (now.train.max_eval_steps > 0 && !same_batches) return false;
  return std::ranges::all_of(
      kKeys, [&](const char* name) { return same_value(*config::find_key(name), before, now); });
}

}  // namespace

Resumption prepare_resume(config::Config config, const parallel::GradientSync& gradient_sync,
                          const fs::path& folder) {
  if (config.run.resume.empty()) return {.config = std::move(config)};
  const auto origin = origin_from(run_on_rank0_and_broadcast(
      gradient_sync, [&] { return to_json(find_origin(config.run.resume, folder)); }));
  if (!origin) return {.config = std::move(config)};
  const bool is_first = gradient_sync.rank() == 0;
  config.run.resume = origin->checkpoint;  // Trainer takes the same
  if (is_first && !config.model.weights.empty()) {
    base::log_info("model.weights is not read: the parameters are those of " + origin->checkpoint);
  }
  // Another number would be another order of additions. One that is given and differs is an error later on.
  if (config.distributed.virtual_ranks > 0 && config.train.threads == 0)
    config.train.threads = origin->threads;
  const std::optional<config::Config> before = config_of(*origin, is_first);
  const bool same_step = keep_step(config.train, *origin, before ? &before->train : nullptr, gradient_sync);
  if (!before) return {.config = std::move(config), .is_resumed = true};
  if (same_step) {
    keep_rate(config.optim, config.train, before->optim, lr_base_size(before->optim, before->train));
  }
  const std::string changes = check_resume(*before, config, same_step, origin->checkpoint);
  if (is_first && !changes.empty()) base::log_info("continuing with other settings: " + changes);
  const bool keep_best = evaluates_as(*before, origin->world_size, config, gradient_sync.size());
  return {.config = std::move(config), .is_resumed = true, .keep_best = keep_best};
}

}  // namespace cohort::train
