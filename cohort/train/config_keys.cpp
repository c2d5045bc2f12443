#include "cohort/train/config_keys.h"

#include <algorithm>
#include <cctype>

namespace cohort::train {
namespace {

constexpr double kMany = 9007199254740992.0;  // 2^53: every whole number up to here is a double

bool is_device(const std::string& text) {
  if (text == "auto" || text == "cpu" || text == "cuda") return true;
  return text.size() > 5 && text.size() <= 9 && text.starts_with("cuda:") &&
         std::all_of(text.begin() + 5, text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
}

bool is_name(const std::string& text) {
  return text.find('/') == std::string::npos && text != "." && text != "..";
}

bool is_not_empty(const std::string& text) {
  return !text.empty();
}

std::vector<ConfigKey> model_keys() {
  return {
      {.name = "model.name",
       .target = [](Config& c) -> KeyTarget { return &c.model.name; },
       .help = "Model: vgg11, vgg13, vgg16, vgg19 (each also with _bn), resnet18, resnet34, resnet50, mlp, "
               "lenet5, "
               "or one that a library given with --load registers.",
       .form = "the name of a model",
       .matches = is_not_empty},
      {.name = "model.num_classes",
       .target = [](Config& c) -> KeyTarget { return &c.model.num_classes; },
       .help = "Classes that the model tells apart; 0: counted in the data.",
       .min = 0,
       .max = 1e7},
      {.name = "model.width",
       .target = [](Config& c) -> KeyTarget { return &c.model.width; },
       .help = "Factor on the number of channels of each VGG layer.",
       .min = 0,
       .max = 64,
       .min_is_open = true},
      {.name = "model.pools",
       .target = [](Config& c) -> KeyTarget { return &c.model.pools; },
       .help = "How many of VGG's five poolings there are; the last ones are left out first.",
       .min = 0,
       .max = 5},
      {.name = "model.head",
       .target = [](Config& c) -> KeyTarget { return &c.model.head; },
       .help =
           "What stands on the convolutions: the model's own head, or global average pooling and one linear "
           "layer.",
       .choices = {"default", "linear"}},
      {.name = "model.dropout",
       .target = [](Config& c) -> KeyTarget { return &c.model.dropout; },
       .help = "Probability with which VGG's default head drops a value.",
       .min = 0,
       .max = 1},
      {.name = "model.weights",
       .target = [](Config& c) -> KeyTarget { return &c.model.weights; },
       .help = "A model.safetensors file or a checkpoint folder to start from; empty: initial values from "
               "run.seed."},
      {.name = "model.options",
       .target = [](Config& c) -> KeyTarget { return &c.model.options; },
       .help = "Names and values handed to the model as they are."},
  };
}

std::vector<ConfigKey> data_keys() {
  return {
      {.name = "data.kind",
       .target = [](Config& c) -> KeyTarget { return &c.data.kind; },
       .help =
           "Where samples come from: image_folder (a folder per class), idx (MNIST's files), synthetic, or a "
           "data set that a library given with --load registers.",
       .form = "the name of a kind of data set",
       .matches = is_not_empty},
      {.name = "data.path",
       .target = [](Config& c) -> KeyTarget { return &c.data.path; },
       .help = "Folder with train/ and val/ (image_folder), or with the files (idx). Relative to where the "
               "program "
               "is started."},
      {.name = "data.train",
       .target = [](Config& c) -> KeyTarget { return &c.data.train; },
       .help = "Training data, where it is not data.path/train."},
      {.name = "data.val",
       .target = [](Config& c) -> KeyTarget { return &c.data.val; },
       .help = "Validation data, where it is not data.path/val."},
      {.name = "data.color",
       .target = [](Config& c) -> KeyTarget { return &c.data.color; },
       .help = "What pictures are turned into: three channels or one.",
       .choices = {"rgb", "grey"}},
      {.name = "data.image_size",
       .target = [](Config& c) -> KeyTarget { return &c.data.image_size; },
       .help = "Height and width of what the model sees, in pixels; the presets of the transforms use it.",
       .min = 1,
       .max = 16384},
      {.name = "data.train_transforms",
       .target = [](Config& c) -> KeyTarget { return &c.data.train_transforms; },
       .help = "What is done to training pictures, in order; a preset, or a list.",
       .choices = {"auto", "none", "resize", "flip", "crop_flip", "imagenet"}},
      {.name = "data.val_transforms",
       .target = [](Config& c) -> KeyTarget { return &c.data.val_transforms; },
       .help = "What is done to validation pictures, in order; a preset, or a list.",
       .choices = {"auto", "none", "resize", "imagenet"}},
      {.name = "data.mean",
       .target = [](Config& c) -> KeyTarget { return &c.data.mean; },
       .help = "Mean of each channel (pixels are 0..1), taken off by Normalize; empty: no Normalize. `cohort "
               "data "
               "stats` computes it.",
       .min = -1e6,
       .max = 1e6},
      {.name = "data.std",
       .target = [](Config& c) -> KeyTarget { return &c.data.std; },
       .help = "Standard deviation of each channel, divided by in Normalize; as many as data.mean.",
       .min = 0,
       .max = 1e6,
       .min_is_open = true},
      {.name = "data.shuffle",
       .target = [](Config& c) -> KeyTarget { return &c.data.shuffle; },
       .help = "A new order of the training samples in each epoch, made from run.seed + epoch."},
      {.name = "data.drop_last",
       .target = [](Config& c) -> KeyTarget { return &c.data.drop_last; },
       .help = "Leave out the last training batch of an epoch when it is not full."},
      {.name = "data.workers",
       .target = [](Config& c) -> KeyTarget { return &c.data.workers; },
       .help =
           "Threads that read and transform while the step computes; 0: the compute threads do it between "
           "steps. The numbers are the same for any.",
       .min = 0,
       .max = 1024},
      {.name = "data.prefetch",
       .target = [](Config& c) -> KeyTarget { return &c.data.prefetch; },
       .help = "Batches made ahead of the one in use.",
       .min = 1,
       .max = 1024},
      {.name = "data.pin_memory",
       .target = [](Config& c) -> KeyTarget { return &c.data.pin_memory; },
       .help =
           "Batches in page-locked memory, copied while the last step runs. Without an accelerator it does "
           "nothing, and that is said once."},
      {.name = "data.on_error",
       .target = [](Config& c) -> KeyTarget { return &c.data.on_error; },
       .help = "A picture that cannot be read ends the run, or is left out, named and counted.",
       .choices = {"refuse", "skip"}},
      {.name = "data.empty_class",
       .target = [](Config& c) -> KeyTarget { return &c.data.empty_class; },
       .help = "A class folder without pictures ends the run, or stays a class without samples.",
       .choices = {"refuse", "keep"}},
      {.name = "data.cache",
       .target = [](Config& c) -> KeyTarget { return &c.data.cache; },
       .help = "Keep the bytes of the image files in memory after the first read.",
       .choices = {"none", "encoded"},
       .used_with = "data.kind",
       .used_values = {"image_folder"}},
      {.name = "data.synthetic_train",
       .target = [](Config& c) -> KeyTarget { return &c.data.synthetic_train; },
       .help = "Training samples that are made up.",
       .min = 1,
       .max = kMany,
       .used_with = "data.kind",
       .used_values = {"synthetic"}},
      {.name = "data.synthetic_val",
       .target = [](Config& c) -> KeyTarget { return &c.data.synthetic_val; },
       .help = "Validation samples that are made up.",
       .min = 1,
       .max = kMany,
       .used_with = "data.kind",
       .used_values = {"synthetic"}},
      {.name = "data.options",
       .target = [](Config& c) -> KeyTarget { return &c.data.options; },
       .help = "Names and values handed to a registered data set as they are."},
  };
}

std::vector<ConfigKey> optim_keys() {
  return {
      {.name = "optim.name",
       .target = [](Config& c) -> KeyTarget { return &c.optim.name; },
       .help = "Optimizer.",
       .choices = {"sgd", "adam", "adamw"}},
      {.name = "optim.lr",
       .target = [](Config& c) -> KeyTarget { return &c.optim.lr; },
       .help = "Learning rate; the schedule multiplies it.",
       .min = 0,
       .max = 1e6},
      {.name = "optim.momentum",
       .target = [](Config& c) -> KeyTarget { return &c.optim.momentum; },
       .help = "Momentum.",
       .min = 0,
       .max = 1,
       .used_with = "optim.name",
       .used_values = {"sgd"}},
      {.name = "optim.nesterov",
       .target = [](Config& c) -> KeyTarget { return &c.optim.nesterov; },
       .help = "Nesterov's momentum; needs optim.momentum above 0.",
       .used_with = "optim.name",
       .used_values = {"sgd"}},
      {.name = "optim.weight_decay",
       .target = [](Config& c) -> KeyTarget { return &c.optim.weight_decay; },
       .help = "Weight decay: added to the gradient (sgd, adam), or taken off the weights (adamw).",
       .min = 0,
       .max = 1e6},
      {.name = "optim.betas",
       .target = [](Config& c) -> KeyTarget { return &c.optim.betas; },
       .help = "Adam's two decay rates.",
       .min = 0,
       .max = 0.9999999,
       .used_with = "optim.name",
       .used_values = {"adam", "adamw"}},
      {.name = "optim.eps",
       .target = [](Config& c) -> KeyTarget { return &c.optim.eps; },
       .help = "Added to Adam's denominator.",
       .min = 0,
       .max = 1,
       .used_with = "optim.name",
       .used_values = {"adam", "adamw"}},
      {.name = "optim.no_decay_on_norm_and_bias",
       .target = [](Config& c) -> KeyTarget { return &c.optim.no_decay_on_norm_and_bias; },
       .help = "No weight decay on biases and on the parameters of normalisation layers."},
      {.name = "optim.clip_norm",
       .target = [](Config& c) -> KeyTarget { return &c.optim.clip_norm; },
       .help = "Gradients are scaled so that their joint norm is at most this; 0: no clipping.",
       .min = 0,
       .max = 1e30},
  };
}

std::vector<ConfigKey> schedule_keys() {
  return {
      {.name = "schedule.name",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.name; },
       .help = "How the learning rate moves after the warm-up: constant; step (times gamma every step_size); "
               "multistep (times gamma at each milestone); cosine and linear (down to eta_min at the end of "
               "the run); "
               "one_cycle.",
       .choices = {"constant", "step", "multistep", "cosine", "linear", "one_cycle"}},
      {.name = "schedule.unit",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.unit; },
       .help = "What milestones and step_size count, and how often the rate changes. A warm-up changes it at "
               "every "
               "step, and so does one_cycle.",
       .choices = {"epoch", "step"}},
      {.name = "schedule.warmup_epochs",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.warmup_epochs; },
       .help =
           "Length of a linear warm-up in epochs (0.5 is half of one). One of the three lengths may be set.",
       .min = 0,
       .max = 1e9},
      {.name = "schedule.warmup_steps",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.warmup_steps; },
       .help = "The same in steps.",
       .min = 0,
       .max = kMany},
      {.name = "schedule.warmup_fraction",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.warmup_fraction; },
       .help = "The same as a share of all steps of the run.",
       .min = 0,
       .max = 1},
      {.name = "schedule.warmup_start",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.warmup_start; },
       .help = "Factor on the learning rate with which the warm-up begins.",
       .min = 0,
       .max = 1},
      {.name = "schedule.milestones",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.milestones; },
       .help = "Where the rate is multiplied by gamma, rising.",
       .min = 0,
       .max = kMany,
       .used_with = "schedule.name",
       .used_values = {"multistep"}},
      {.name = "schedule.step_size",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.step_size; },
       .help = "How far apart the multiplications by gamma are.",
       .min = 1,
       .max = kMany,
       .used_with = "schedule.name",
       .used_values = {"step"}},
      {.name = "schedule.gamma",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.gamma; },
       .help = "Factor.",
       .min = 0,
       .max = 1e6,
       .used_with = "schedule.name",
       .used_values = {"step", "multistep"}},
      {.name = "schedule.eta_min",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.eta_min; },
       .help = "Learning rate at the end.",
       .min = 0,
       .max = 1e6,
       .used_with = "schedule.name",
       .used_values = {"cosine", "linear"}},
      {.name = "schedule.pct_start",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.pct_start; },
       .help = "Share of the run in which the rate rises to optim.lr.",
       .min = 0,
       .max = 1,
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.div_factor",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.div_factor; },
       .help = "The rate begins at optim.lr / div_factor.",
       .min = 0,
       .max = 1e12,
       .min_is_open = true,
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.final_div_factor",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.final_div_factor; },
       .help = "The rate ends at optim.lr / div_factor / final_div_factor.",
       .min = 0,
       .max = 1e12,
       .min_is_open = true,
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.anneal",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.anneal; },
       .help = "Shape of the rise and the fall.",
       .choices = {"cosine", "linear"},
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.three_phase",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.three_phase; },
       .help = "Fall as long as it rose, then to the end.",
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.cycle_momentum",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.cycle_momentum; },
       .help = "Move the momentum against the rate.",
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.base_momentum",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.base_momentum; },
       .help = "Momentum where the rate is highest.",
       .min = 0,
       .max = 1,
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
      {.name = "schedule.max_momentum",
       .target = [](Config& c) -> KeyTarget { return &c.schedule.max_momentum; },
       .help = "Momentum where the rate is lowest.",
       .min = 0,
       .max = 1,
       .used_with = "schedule.name",
       .used_values = {"one_cycle"}},
  };
}

std::vector<ConfigKey> train_keys() {
  return {
      {.name = "train.epochs",
       .target = [](Config& c) -> KeyTarget { return &c.train.epochs; },
       .help = "How often every training sample is seen.",
       .min = 1,
       .max = 1e9},
      {.name = "train.max_steps",
       .target = [](Config& c) -> KeyTarget { return &c.train.max_steps; },
       .help = "The run stops after so many optimizer steps; 0: after train.epochs.",
       .min = 0,
       .max = kMany},
      {.name = "train.batch_size",
       .target = [](Config& c) -> KeyTarget { return &c.train.batch_size; },
       .help = "Samples of one batch in this process.",
       .min = 1,
       .max = 1e7},
      {.name = "train.eval_batch_size",
       .target = [](Config& c) -> KeyTarget { return &c.train.eval_batch_size; },
       .help = "The same for evaluation; 0: train.batch_size.",
       .min = 0,
       .max = 1e7},
      {.name = "train.accumulate",
       .target = [](Config& c) -> KeyTarget { return &c.train.accumulate; },
       .help = "Batches whose gradients are averaged into one step.",
       .min = 1,
       .max = 1e6},
      {.name = "train.label_smoothing",
       .target = [](Config& c) -> KeyTarget { return &c.train.label_smoothing; },
       .help = "Share of the target that is spread over all classes in the training loss.",
       .min = 0,
       .max = 1},
      {.name = "train.precision",
       .target = [](Config& c) -> KeyTarget { return &c.train.precision; },
       .help = "f32, or bf16: matrix products and convolutions in bfloat16, parameters in float32.",
       .choices = {"f32", "bf16"}},
      {.name = "train.memory_format",
       .target = [](Config& c) -> KeyTarget { return &c.train.memory_format; },
       .help = "Order of pictures and weights in memory; channels_last is the faster one for convolutions.",
       .choices = {"channels_last", "contiguous"}},
      {.name = "train.threads",
       .target = [](Config& c) -> KeyTarget { return &c.train.threads; },
       .help = "Threads inside an operator on the CPU; 0: as many as cores that this process may use.",
       .min = 0,
       .max = 4096},
      {.name = "train.device",
       .target = [](Config& c) -> KeyTarget { return &c.train.device; },
       .help = "Where to compute; auto: the first CUDA device, or the CPU when there is none.",
       .form = "auto, cpu, cuda or cuda:K",
       .matches = is_device},
      {.name = "train.eval_every",
       .target = [](Config& c) -> KeyTarget { return &c.train.eval_every; },
       .help = "Epochs between evaluations; the first and the last epoch are evaluated too. 0: never.",
       .min = 0,
       .max = 1e9},
      {.name = "train.max_eval_steps",
       .target = [](Config& c) -> KeyTarget { return &c.train.max_eval_steps; },
       .help = "Batches of one evaluation; 0: the whole validation set.",
       .min = 0,
       .max = kMany},
      {.name = "train.nan",
       .target = [](Config& c) -> KeyTarget { return &c.train.nan; },
       .help =
           "A loss that is not finite stops the run, naming step and module, or is counted and gone over.",
       .choices = {"stop", "continue"}},
  };
}

std::vector<ConfigKey> run_keys() {
  return {
      {.name = "run.name",
       .target = [](Config& c) -> KeyTarget { return &c.run.name; },
       .help = "Name of the run, in its folder's name and in titles; empty: model.name.",
       .form = "a name without /",
       .matches = is_name},
      {.name = "run.dir",
       .target = [](Config& c) -> KeyTarget { return &c.run.dir; },
       .help = "Run folder; empty: a new one, runs/NAME-DATE-TIME."},
      {.name = "run.resume",
       .target = [](Config& c) -> KeyTarget { return &c.run.resume; },
       .help = "Go on from a checkpoint: auto (last, or a fresh start when there is none), last, best, or "
               "the path of "
               "a checkpoint folder; empty: a fresh start. --resume sets it."},
      {.name = "run.seed",
       .target = [](Config& c) -> KeyTarget { return &c.run.seed; },
       .help = "Everything random follows from it: initial values, order, transforms, dropout.",
       .min = 0,
       .max = kMany},
      {.name = "run.save_every",
       .target = [](Config& c) -> KeyTarget { return &c.run.save_every; },
       .help = "Epochs between checkpoints; the first and the last epoch are saved too. 0: none by epoch.",
       .min = 0,
       .max = 1e9},
      {.name = "run.save_every_steps",
       .target = [](Config& c) -> KeyTarget { return &c.run.save_every_steps; },
       .help = "Steps between checkpoints; 0: none by step.",
       .min = 0,
       .max = kMany},
      {.name = "run.save_every_minutes",
       .target = [](Config& c) -> KeyTarget { return &c.run.save_every_minutes; },
       .help = "Minutes between checkpoints; 0: none by time.",
       .min = 0,
       .max = 1e9},
      {.name = "run.keep",
       .target = [](Config& c) -> KeyTarget { return &c.run.keep; },
       .help = "Newest checkpoints that are kept, besides those that last and best point to; 0: all.",
       .min = 0,
       .max = 1e9},
      {.name = "run.best_metric",
       .target = [](Config& c) -> KeyTarget { return &c.run.best_metric; },
       .help = "Metric by which best is chosen among evaluated epochs: val_accuracy, val_loss, or one of "
               "your own "
               "train step.",
       .form = "the name of a metric",
       .matches = is_not_empty},
      {.name = "run.best_mode",
       .target = [](Config& c) -> KeyTarget { return &c.run.best_mode; },
       .help = "Whether more or less of it is better; auto: less of a name that ends in loss or error, else "
               "more.",
       .choices = {"auto", "max", "min"}},
      {.name = "run.log_every",
       .target = [](Config& c) -> KeyTarget { return &c.run.log_every; },
       .help = "Steps between rows of metrics.jsonl, points in TensorBoard and plain lines.",
       .min = 1,
       .max = kMany},
      {.name = "run.progress",
       .target = [](Config& c) -> KeyTarget { return &c.run.progress; },
       .help = "What is shown while it runs; auto: a bar on a terminal, plain lines elsewhere.",
       .choices = {"auto", "bar", "plain", "off"}},
      {.name = "run.tensorboard",
       .target = [](Config& c) -> KeyTarget { return &c.run.tensorboard; },
       .help = "Write event files for TensorBoard."},
      {.name = "run.images",
       .target = [](Config& c) -> KeyTarget { return &c.run.images; },
       .help = "Input pictures of the first batch that go to TensorBoard.",
       .min = 0,
       .max = 1024},
      {.name = "run.trace",
       .target = [](Config& c) -> KeyTarget { return &c.run.trace; },
       .help = "Steps recorded in trace.json (Chrome's trace format), from the first one on; 0: none.",
       .min = 0,
       .max = 1e6},
  };
}

std::vector<ConfigKey> all_keys() {
  std::vector<ConfigKey> keys;
  for (auto* part : {model_keys, data_keys, optim_keys, schedule_keys, train_keys, run_keys}) {
    for (ConfigKey& key : part()) keys.push_back(std::move(key));
  }
  return keys;
}

}  // namespace

std::string_view ConfigKey::section() const {
  const std::string_view whole = name;
  return whole.substr(0, whole.find('.'));
}

std::string_view ConfigKey::short_name() const {
  const std::string_view whole = name;
  return whole.substr(whole.find('.') + 1);
}

std::span<const ConfigKey> config_keys() {
  static const std::vector<ConfigKey> keys = all_keys();
  return keys;
}

const ConfigKey* find_key(std::string_view name) {
  for (const ConfigKey& key : config_keys()) {
    if (name == key.name) return &key;
  }
  return nullptr;
}

std::span<const std::string> config_sections() {
  static const std::vector<std::string> sections = {"model", "data", "optim", "schedule", "train", "run"};
  return sections;
}

}  // namespace cohort::train
