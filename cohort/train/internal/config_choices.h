#pragma once

#include "cohort/config/types.h"
#include "cohort/data/folder_scan.h"
#include "cohort/data/image.h"
#include "cohort/data/loader.h"
#include "cohort/data/sampler.h"

/// Settings whose values are words, as the types that the words stand for.
///
/// load_config() and check_config() reject an unknown word. A program may make a Config itself and check
/// nothing, so each function rejects it too. Throws: ConfigError that lists the choices.
namespace cohort::train {

data::ColorMode color_of(const config::DataConfig& data);
/// Of training: data.last_batch.
data::LastBatchPolicy last_batch_of(const config::DataConfig& data);
data::OnError on_error_of(const config::DataConfig& data);
data::OnOtherFiles on_other_files_of(const config::DataConfig& data);
/// Whether data.empty_class is keep.
bool keeps_empty_classes(const config::DataConfig& data);
/// Whether data.cache is encoded.
bool caches_files(const config::DataConfig& data);

/// Whether train.precision is bf16.
bool is_bf16(const config::TrainConfig& train);
/// Whether train.memory_format is channels_last.
bool is_channels_last(const config::TrainConfig& train);
/// Whether train.on_nonfinite is stop.
bool stops_on_nonfinite(const config::TrainConfig& train);

/// Whether schedule.unit is epoch.
bool counts_epochs(const config::ScheduleConfig& schedule);
/// Whether schedule.anneal is linear.
bool anneals_linearly(const config::ScheduleConfig& schedule);

}  // namespace cohort::train
