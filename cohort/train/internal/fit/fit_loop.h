#pragma once

#include <memory>
#include <vector>

#include "cohort/train/callback.h"
#include "cohort/train/task.h"
#include "cohort/train/trainer_options.h"

namespace cohort::train {

/// One call of Trainer::fit(). `eval`: null, where nothing is evaluated. Throws: as fit().
FitResult run_fit_loop(const TrainerOptions& options, const std::vector<std::shared_ptr<Callback>>& callbacks,
                       Task& task, data::Loader& train, data::Loader* eval);

}  // namespace cohort::train
