#include "cohort/train/trainer.h"

#include "cohort/base/error.h"
#include "cohort/train/internal/fit/compatibility.h"
#include "cohort/train/internal/fit/evaluation.h"
#include "cohort/train/internal/fit/fit_loop.h"
#include "cohort/train/internal/fit/fit_ranks.h"
#include "cohort/train/internal/fit/run_state.h"
#include "cohort/train/weights.h"

namespace cohort::train {

Trainer::Trainer(TrainerOptions options) : options_(std::move(options)) {
  if (options_.epochs() < 1) {
    throw UsageError("train.Trainer",
                     base::concat("epochs: got ", options_.epochs(), ", expected at least 1"));
  }
  BestMetric(options_, false);  // throws for a name that does not say what is better
}

void Trainer::add_callback(std::shared_ptr<Callback> callback) {
  callbacks_.push_back(std::move(callback));
}

FitResult Trainer::fit(Task& task, data::Loader& train, data::Loader* eval) {
  return run_fit_loop(options_, callbacks_, task, train, eval);
}

std::map<std::string, double> Trainer::evaluate(Task& task, data::Loader& loader) {
  if (options_.session() != nullptr) {
    throw UsageError("train.elastic",
                     "evaluate() of an elastic run: its processes evaluate within fit() alone",
                     "a Trainer without a session");
  }
  const FitRanks ranks(options_);
  // A loader of another share would count some samples twice and others never.
  check_share(ranks.gradient_sync(), loader, "evaluation");
  // On all ranks alike: the means at the end are a collective.
  return evaluate_batches(
      task, loader, ranks.coordinator(),
      {.max_batches = options_.max_eval_batches(), .seed = evaluation_seed(options_, ranks.gradient_sync())});
}

void load_model(Task& task, const std::filesystem::path& checkpoint) {
  restore_modules(task, read_weights(checkpoint));
}

}  // namespace cohort::train
