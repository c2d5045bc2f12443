// A table: the rows of optim.*, schedule.* and train.*, as in tables_data.cpp. Keys that set the size of a
// step have makes_step: they may change on resume only together, so that the step has as many samples as
// before. The optimizer and its groups are rejected, since the checkpoint holds their state. `used_values`
// says for which optimizer or schedule a key has an effect. Two parts read it: the warning about keys without
// an effect, and the factory of optimizers, which hands on only what the optimizer has. An optimizer or
// schedule of a library has its own values in optim.options or schedule.options.
#include <algorithm>
#include <cctype>

#include "cohort/config/internal/tables.h"

namespace cohort::config {
namespace {

bool is_device(const std::string& text) {
  if (text == "auto" || text == "cpu" || text == "cuda") return true;
  // At most four digits: a longer number would overflow where LibTorch parses the device.
  return text.size() > 5 && text.size() <= 9 && text.starts_with("cuda:") &&
         std::all_of(text.begin() + 5, text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
}

}  // namespace

// Options of the optimizer take effect on resume, though the checkpoint has them too: the configuration of
// the new start wins. Only what the state depends on is rejected.
std::vector<ConfigKey> optim_keys() {
  return {
      {.name = "optim.name",
       .target = [](Config& c) -> KeyTarget { return &c.optim.name; },
       .on_resume = OnResume::kRejected,
       .help = "Optimizer: sgd, adam, adamw, or one that a library given with --load registers.",
       .form = "the name of an optimizer",
       .matches = is_not_empty},
      // load_config() fills it in by default_lr(), since the default depends on another key.
      {.name = "optim.lr",
       .target = [](Config& c) -> KeyTarget { return &c.optim.lr; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Learning rate; the schedule multiplies it. Where none is set, it is 0.1 with sgd and 0.001 "
               "with all others.",
       .min = 0,
       .max = 1e6},
      {.name = "optim.lr_scaling",
       .target = [](Config& c) -> KeyTarget { return &c.optim.lr_scaling; },
       .on_resume = OnResume::kTakesEffect,
       .help =
           "What optim.lr is multiplied by: none (1), linear (samples of a step, over all ranks, divided by "
           "optim.lr_base_size: Goyal et al. 2017), sqrt (the root of that).",
       .choices = {"none", "linear", "sqrt"}},
      // prepare_resume() sets it, so that a scaled rate stays when the batch size of one rank changes.
      {.name = "optim.lr_base_size",
       .target = [](Config& c) -> KeyTarget { return &c.optim.lr_base_size; },
       .on_resume = OnResume::kTakesEffect,
       .help =
           "Samples of a step that optim.lr is for; 0: train.batch_size * train.accumulate, one rank's, of "
           "the start that made the run.",
       .min = 0,
       .max = kMany,
       .used_with = "optim.lr_scaling",
       .used_values = {"linear", "sqrt"}},
      {.name = "optim.momentum",
       .target = [](Config& c) -> KeyTarget { return &c.optim.momentum; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Momentum.",
       .min = 0,
       .max = 1,
       .used_with = "optim.name",
       .used_values = {"sgd"}},
      {.name = "optim.nesterov",
       .target = [](Config& c) -> KeyTarget { return &c.optim.nesterov; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Nesterov's momentum; needs optim.momentum above 0.",
       .used_with = "optim.name",
       .used_values = {"sgd"}},
      {.name = "optim.weight_decay",
       .target = [](Config& c) -> KeyTarget { return &c.optim.weight_decay; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Weight decay: added to the gradient (sgd, adam), or taken off the weights (adamw).",
       .min = 0,
       .max = 1e6},
      {.name = "optim.betas",
       .target = [](Config& c) -> KeyTarget { return &c.optim.betas; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Adam's two decay rates.",
       .min = 0,
       // Below 1: Adam's bias correction divides by 1 - beta^t.
       .max = 0.9999999,
       .used_with = "optim.name",
       .used_values = {"adam", "adamw"}},
      {.name = "optim.eps",
       .target = [](Config& c) -> KeyTarget { return &c.optim.eps; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Added to Adam's denominator.",
       .min = 0,
       .max = 1,
       .used_with = "optim.name",
       .used_values = {"adam", "adamw"}},
      // The state counts parameters through all groups, and this key makes two groups of them.
      {.name = "optim.no_decay_on_norm_and_bias",
       .target = [](Config& c) -> KeyTarget { return &c.optim.no_decay_on_norm_and_bias; },
       .on_resume = OnResume::kRejected,
       .help = "No weight decay on biases and on the parameters of normalisation layers."},
      {.name = "optim.clip_norm",
       .target = [](Config& c) -> KeyTarget { return &c.optim.clip_norm; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Gradients are scaled so that their joint norm is at most this; 0: no clipping.",
       .min = 0,
       .max = 1e30},
      {.name = "optim.options",
       .target = [](Config& c) -> KeyTarget { return &c.optim.options; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Names and values for a registered optimizer."},
  };
}

// All of these may change on resume. A schedule is a function of the step and of the first rate, so a
// checkpoint holds no state of it. What several keys must satisfy together is in check_schedule() of
// config.cpp: at most one length of a warm-up, and milestones that rise.
std::vector<ConfigKey> schedule_keys() {
  return {
      {.name = "schedule.name",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.name; },
       .on_resume = OnResume::kTakesEffect,
       .help = "How the learning rate moves after the warm-up: constant; step (times gamma every step_size); "
               "multistep (times gamma at each milestone); cosine and linear (down to eta_min at the end of "
               "the run); one_cycle; or one that a library given with --load registers.",
       .form = "the name of a schedule",
       .matches = is_not_empty},
      {.name = "schedule.unit",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.unit; },
       .on_resume = OnResume::kTakesEffect,
       .help = "What milestones and step_size count, and how often the rate changes. A warm-up changes it at "
               "every "
               "step, and so does one_cycle.",
       .choices = {"epoch", "step"}},
      {.name = "schedule.warmup_epochs",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.warmup_epochs; },
       .on_resume = OnResume::kTakesEffect,
       .help =
           "Length of a linear warm-up in epochs (0.5 is half of one). One of the three lengths may be set.",
       .min = 0,
       .max = 1e9},
      {.name = "schedule.warmup_steps",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.warmup_steps; },
       .on_resume = OnResume::kTakesEffect,
       .help = "The same in steps.",
       .min = 0,
       .max = kMany},
      {.name = "schedule.warmup_fraction",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.warmup_fraction; },
       .on_resume = OnResume::kTakesEffect,
       .help = "The same as a share of all steps of the run.",
       .min = 0,
       .max = 1},
      {.name = "schedule.warmup_start",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.warmup_start; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Factor on the learning rate with which the warm-up begins.",
       .min = 0,
       .max = 1},
      {.name = "schedule.milestones",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.milestones; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Where the rate is multiplied by gamma, rising.",
       .min = 0,
       .max = kMany,
       .used_with = "schedule.name",
       .used_values = {"multistep"}},
      {.name = "schedule.step_size",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.step_size; },
       .on_resume = OnResume::kTakesEffect,
       .help = "How far apart the multiplications by gamma are.",
       .min = 1,
       .max = kMany,
       .used_with = "schedule.name",
       .used_values = {"step"}},
      {.name = "schedule.gamma",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.gamma; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Factor.",
       .min = 0,
       .max = 1e6,
       .used_with = "schedule.name",
       .used_values = {"step", "multistep"}},
      {.name = "schedule.eta_min",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.eta_min; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Learning rate at the end.",
       .min = 0,
       .max = 1e6,
       .used_with = "schedule.name",
       .used_values = {"cosine", "linear"}},
      {.name = "schedule.pct_start",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.pct_start; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Share of the run in which the rate rises to optim.lr.",
       .min = 0,
       .max = 1,
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.div_factor",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.div_factor; },
       .on_resume = OnResume::kTakesEffect,
       .help = "The rate begins at optim.lr / div_factor.",
       // The rate is divided by it.
       .min = 0,
       .max = 1e12,
       .min_is_open = true,
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.final_div_factor",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.final_div_factor; },
       .on_resume = OnResume::kTakesEffect,
       .help = "The rate ends at optim.lr / div_factor / final_div_factor.",
       .min = 0,
       .max = 1e12,
       .min_is_open = true,
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.anneal",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.anneal; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Shape of the rise and the fall.",
       .choices = {"cosine", "linear"},
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.three_phase",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.three_phase; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Fall as long as it rose, then to the end.",
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.cycle_momentum",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.cycle_momentum; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Move the momentum against the rate.",
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.base_momentum",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.base_momentum; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Momentum where the rate is highest.",
       .min = 0,
       .max = 1,
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.max_momentum",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.max_momentum; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Momentum where the rate is lowest.",
       .min = 0,
       .max = 1,
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.options",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.options; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Names and values for a registered schedule."},
  };
}

// Numbers of epochs and steps may be 0 where 0 means "no limit" or "never"; the help of the key says which.
std::vector<ConfigKey> train_keys() {
  return {
      {.name = "train.epochs",
       .target = [](Config& c) -> KeyTarget { return &c.train.epochs; },
       .on_resume = OnResume::kTakesEffect,
       .help =
           "How often every training sample is seen. Schedules but step and multistep, and "
           "warmup_fraction, are of this length: another number moves the rate of the steps that are left.",
       .min = 1,
       .max = 1e9},
      {.name = "train.max_steps",
       .target = [](Config& c) -> KeyTarget { return &c.train.max_steps; },
       .on_resume = OnResume::kTakesEffect,
       .help = "The run ends after so many optimizer steps, and schedules have this length, as with "
               "train.epochs; 0: after train.epochs. To pause a run, send it SIGTERM.",
       .min = 0,
       .max = kMany},
      {.name = "train.batch_size",
       .target = [](Config& c) -> KeyTarget { return &c.train.batch_size; },
       .on_resume = OnResume::kTakesEffect,
       .makes_step = true,
       .help = "Samples of one batch on each rank, or on each virtual rank.",
       .min = 1,
       .max = 1e7},
      {.name = "train.global_batch_size",
       .target = [](Config& c) -> KeyTarget { return &c.train.global_batch_size; },
       .on_resume = OnResume::kTakesEffect,
       .makes_step = true,
       .help = "Samples of one step over all ranks, dealt out evenly whatever their number; in place of "
               "train.batch_size. 0: batch_size times accumulate times ranks.",
       .min = 0,
       .max = 1e9},
      // Evaluation changes no parameter, so this key does not make a step.
      {.name = "train.eval_batch_size",
       .target = [](Config& c) -> KeyTarget { return &c.train.eval_batch_size; },
       .on_resume = OnResume::kTakesEffect,
       .help = "The same for evaluation; 0: train.batch_size.",
       .min = 0,
       .max = 1e7},
      {.name = "train.accumulate",
       .target = [](Config& c) -> KeyTarget { return &c.train.accumulate; },
       .on_resume = OnResume::kTakesEffect,
       .makes_step = true,
       .help = "Batches whose gradients are averaged into one step.",
       .min = 1,
       .max = 1e6},
      {.name = "train.label_smoothing",
       .target = [](Config& c) -> KeyTarget { return &c.train.label_smoothing; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Share of the target that is spread over all classes in the training loss.",
       .min = 0,
       .max = 1},
      // Parameters are float32 with either word, so checkpoints fit both.
      {.name = "train.precision",
       .target = [](Config& c) -> KeyTarget { return &c.train.precision; },
       .on_resume = OnResume::kTakesEffect,
       .help = "f32, or bf16: matrix products and convolutions in bfloat16, parameters in float32.",
       .choices = {"f32", "bf16"}},
      {.name = "train.memory_format",
       .target = [](Config& c) -> KeyTarget { return &c.train.memory_format; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Order of images and weights in memory; channels_last is the faster one for convolutions.",
       .choices = {"channels_last", "contiguous"}},
      {.name = "train.threads",
       .target = [](Config& c) -> KeyTarget { return &c.train.threads; },
       .on_resume = OnResume::kTakesEffect,
       .help =
           "Threads inside an operator on the CPU; 0: as many as cores that this process may use, divided "
           "by the ranks that share them.",
       .min = 0,
       .max = 4096},
      // Whether the device is there is known only when the run starts.
      {.name = "train.device",
       .target = [](Config& c) -> KeyTarget { return &c.train.device; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Where to compute; auto: the first CUDA device, or the CPU when there is none. Where a host "
               "has several ranks, auto and cuda give each a device of its own.",
       .form = "auto, cpu, cuda or cuda:K",
       .matches = is_device},
      {.name = "train.eval_every",
       .target = [](Config& c) -> KeyTarget { return &c.train.eval_every; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Epochs between evaluations; the first and the last epoch are evaluated too. 0: never.",
       .min = 0,
       .max = 1e9},
      {.name = "train.max_eval_steps",
       .target = [](Config& c) -> KeyTarget { return &c.train.max_eval_steps; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Batches of one evaluation; 0: the whole validation set.",
       .min = 0,
       .max = kMany},
      // A replay has the bits of the function itself, so a resume need not mention it.
      {.name = "train.script",
       .target = [](Config& c) -> KeyTarget { return &c.train.script; },
       .on_resume = OnResume::kCannotMatter,
       .help = "Forward, loss and backward are recorded, and replayed without the model's C++ "
               "(docs/guide/script.md): the same numbers, with less time between operators. Not with "
               "model runners that have threads of their own (data_parallel, model_parallel, pipeline)."},
      {.name = "train.on_nonfinite",
       .target = [](Config& c) -> KeyTarget { return &c.train.on_nonfinite; },
       .on_resume = OnResume::kTakesEffect,
       .help = "A loss or gradient that is not finite stops the run, naming step and module or parameter, or "
               "the step is left out and counted.",
       .choices = {"stop", "continue"}},
  };
}

}  // namespace cohort::config
