// Each key has a table of its words, in the order of the table of keys in module config. That module cannot
// hold the types, as it builds without LibTorch, so a test compares both tables.
#include "cohort/train/internal/config_choices.h"

#include <cstddef>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/text/choice.h"

namespace cohort::train {
namespace {

constexpr const char* kWhereSettings = "train.settings";

template <typename Value, std::size_t kCount>
Value value_of(const char* key, const std::string& name, const base::Choice<Value> (&choices)[kCount]) {
  return base::choose<ConfigError>(kWhereSettings, key, name, choices);
}

}  // namespace

data::ColorMode color_of(const config::DataConfig& data) {
  // Module config knows no ColorMode, and checks data.mean by the channels of a color: the names are there.
  return config::image_channels(data) == 1 ? data::ColorMode::kGray : data::ColorMode::kRgb;
}

data::LastBatchPolicy last_batch_of(const config::DataConfig& data) {
  // Gradients are weighted by samples in any case, so shares may differ: "weighted" repeats nothing.
  constexpr base::Choice<data::LastBatchPolicy> kPolicies[] = {{"weighted", data::LastBatchPolicy::kKeep},
                                                               {"pad", data::LastBatchPolicy::kPad}};
  return value_of("data.last_batch", data.last_batch, kPolicies);
}

data::OnError on_error_of(const config::DataConfig& data) {
  constexpr base::Choice<data::OnError> kActions[] = {{"raise", data::OnError::kRaise},
                                                      {"skip", data::OnError::kSkip}};
  return value_of("data.on_error", data.on_error, kActions);
}

data::OnOtherFiles on_other_files_of(const config::DataConfig& data) {
  constexpr base::Choice<data::OnOtherFiles> kActions[] = {{"warn", data::OnOtherFiles::kWarn},
                                                           {"raise", data::OnOtherFiles::kRaise}};
  return value_of("data.on_other_files", data.on_other_files, kActions);
}

bool keeps_empty_classes(const config::DataConfig& data) {
  constexpr base::Choice<bool> kChoices[] = {{"raise", false}, {"keep", true}};
  return value_of("data.empty_class", data.empty_class, kChoices);
}

bool caches_files(const config::DataConfig& data) {
  constexpr base::Choice<bool> kChoices[] = {{"none", false}, {"encoded", true}};
  return value_of("data.cache", data.cache, kChoices);
}

bool is_bf16(const config::TrainConfig& train) {
  constexpr base::Choice<bool> kChoices[] = {{"f32", false}, {"bf16", true}};
  return value_of("train.precision", train.precision, kChoices);
}

bool is_channels_last(const config::TrainConfig& train) {
  constexpr base::Choice<bool> kChoices[] = {{"channels_last", true}, {"contiguous", false}};
  return value_of("train.memory_format", train.memory_format, kChoices);
}

bool stops_on_nonfinite(const config::TrainConfig& train) {
  constexpr base::Choice<bool> kChoices[] = {{"stop", true}, {"continue", false}};
  return value_of("train.on_nonfinite", train.on_nonfinite, kChoices);
}

bool counts_epochs(const config::ScheduleConfig& schedule) {
  constexpr base::Choice<bool> kChoices[] = {{"epoch", true}, {"step", false}};
  return value_of("schedule.unit", schedule.unit, kChoices);
}

bool anneals_linearly(const config::ScheduleConfig& schedule) {
  constexpr base::Choice<bool> kChoices[] = {{"cosine", false}, {"linear", true}};
  return value_of("schedule.anneal", schedule.anneal, kChoices);
}

}  // namespace cohort::train
