// Rank 0 alone reads and writes checkpoints, and the others get what it has read. An error of rank 0 is one
// of all ranks: else they would wait for it in the next collective. Nothing is written before the first
// step.
#include "cohort/train/internal/fit/run_saver.h"

#include <cstdio>
#include <system_error>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/checkpoint/tensor_format.h"
#include "cohort/train/internal/fit/evaluation.h"

namespace cohort::train {
namespace {

std::string numbered_name(const char* format, std::int64_t number) {
  char text[64];
  std::snprintf(text, sizeof text, format, static_cast<long long>(number));
  return text;
}

}  // namespace

RunSaver::RunSaver(const TrainerOptions& options, const RankCoordinator& ranks)
    : policy(options), options_(options), ranks_(ranks) {
  if (!saves()) return;
  checkpoint::tensor_format(options.checkpoint_format());  // an unknown one is an error before a step
  checkpoints_.emplace(
      options.run_dir() / "checkpoints",
      checkpoint::RunCheckpointsOptions{.keep = options.keep(), .format = options.checkpoint_format()});
}

std::optional<checkpoint::LoadedCheckpoint> RunSaver::find(const DataOfRun& eval_data) {
  const std::string& from = options_.resume();
  if (from.empty()) return std::nullopt;
  if (!saves()) {
    throw UsageError("train.resume", base::concat("asked to resume from \"", from, "\" without a run folder"),
                     "TrainerOptions().run_dir(...)");
  }
  const std::optional<checkpoint::LoadedCheckpoint> found = ranks_.load([&] {
    std::optional<checkpoint::LoadedCheckpoint> loaded = load(from);
    if (loaded) forget_lost_best(*loaded, *checkpoints_, eval_data, options_.keep_best());
    return loaded;
  });
  if (!found && from == "auto") {
    if (ranks_.is_first()) base::log_info("nothing to resume: starting from the beginning");
    return std::nullopt;
  }
  if (!found) {
    throw DataError("train.resume",
                    base::concat("no checkpoint \"", from, "\" in ", options_.run_dir().string()),
                    "--resume auto, which starts afresh when there is none");
  }
  last_ = found->folder;
  return found;
}

std::optional<checkpoint::LoadedCheckpoint> RunSaver::load(const std::string& from) const {
  if (from == "auto") return checkpoints_->load_usable();
  if (auto later = load_later_than_start()) return later;
  const std::optional<std::filesystem::path> folder = checkpoints_->find(from);
  if (!folder) return std::nullopt;
  return checkpoint::LoadedCheckpoint{*folder, checkpoint::RunCheckpoints::load(*folder)};
}

std::string RunSaver::goes_back_to() const {
  const std::string& from = options_.resume();
  return ranks_.begins_again() && from != "auto" && from != "last" ? from : "";
}

/// Returns the last checkpoint where an earlier start of the same command has gone back already, and made it.
std::optional<checkpoint::LoadedCheckpoint> RunSaver::load_later_than_start() const {
  const std::string from = goes_back_to();
  if (from.empty()) return std::nullopt;
  std::optional<checkpoint::LoadedCheckpoint> last;
  try {
    last = checkpoints_->load_usable();
    if (!last || run_of(last->content.state).went_back_to != from) return std::nullopt;
  } catch (const DataError&) {
    return std::nullopt;  // the one that is named may be whole
  }
  base::log_info(base::concat("an earlier start has resumed from \"", from,
                              "\" already: this one continues from ", last->folder.string()));
  return last;
}

void RunSaver::start_counts(const std::filesystem::path& resumed_from) {
  if (!saves()) return;
  // The first checkpoint may be an epoch away, and callbacks of all ranks may put their files there from now
  // on. An error of rank 0 is an error of all ranks.
  ranks_.run_on_first([&] {
    std::error_code error;
    std::filesystem::create_directories(options_.run_dir(), error);
    if (error) {
      throw SystemError("train.run_folder",
                        base::concat("cannot make ", options_.run_dir().string(), ": ", error.message()));
    }
    if (!resumed_from.empty()) checkpoints_->go_back_to(resumed_from);
  });
}

void RunSaver::write(const Task& task, const RunState& state, bool is_best) {
  const bool between_epochs = state.loader.samples_consumed == 0;
  const std::string name =
      between_epochs ? numbered_name("epoch_%04lld", state.epoch) : numbered_name("step_%08lld", state.step);
  // An elastic run that lost a process does again what follows its last step.
  if (!written_.empty() && written_.begin()->step != state.step) written_.clear();
  if (!written_.insert(Written{state.step, state.reported_step, is_best, name}).second) return;
  last_ = checkpoints_->save(name, capture(task, state), {.is_best = is_best});
}

}  // namespace cohort::train
