#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

/// The settings of a run. A member's name is its key: `optim.lr` is `Config::optim.lr`. The initializers are
/// the defaults.
namespace cohort::config {

/// Section `model`: which model, and how large.
struct ModelConfig {
  std::string name = "vgg16";
  std::int64_t num_classes = 0;  ///< 0: counted in the data
  double width = 1.0;            ///< factor on the channels of VGG's layers
  std::int64_t pools = 5;        ///< of VGG's five poolings, those that there are; the last ones go first
  std::string head = "default";  ///< default, linear
  double dropout = 0.5;          ///< probability with which VGG's default head drops a value
  std::string weights = {};      ///< to start from: a path as find_weights() takes it
  std::map<std::string, std::string> options = {};  ///< passed to a registered model as they are
  bool operator==(const ModelConfig&) const = default;
};

/// One transform by name; a single number is a vector of one.
struct TransformConfig {
  std::string name = {};  ///< of a registered transform
  std::map<std::string, std::vector<double>> args = {};
  bool operator==(const TransformConfig&) const = default;
};

/// Either a preset by name, or (when `preset` is empty) the transforms one by one.
struct TransformList {
  /// auto, none, resize, imagenet; in training also flip and crop_flip.
  std::string preset = "auto";
  std::vector<TransformConfig> list = {};
  bool operator==(const TransformList&) const = default;
};

/// Section `data`: samples, and how they are read and turned into batches.
struct DataConfig {
  std::string type = "image_folder";  ///< image_folder, idx, synthetic, or a registered name
  std::string path = "data";
  std::string train = {};               ///< empty: path/train (see `train_path`)
  std::string val = {};                 ///< empty: path/val (see `val_path`)
  std::string color = "rgb";            ///< what images are decoded to: rgb, gray
  std::int64_t image_size = 224;        ///< pixels, both ways: for the presets of transforms
  TransformList train_transforms = {};  ///< use `train_transforms(config)`: presets expanded, Normalize added
  TransformList val_transforms = {};    ///< as `train_transforms`: use `val_transforms(config)`
  std::vector<double> mean = {};        ///< of pixels in 0..1; empty: no Normalize
  std::vector<double> std = {};         ///< per channel, as many as `mean`
  bool shuffle = true;
  bool drop_last = false;  ///< leave out a last training batch that is not full
  // Not LoaderOptions' defaults: a run reads ahead and weighs shares, a Loader of one's own starts no threads
  // and deals equal shares, as PyTorch's DataLoader and DistributedSampler.
  std::string last_batch = "weighted";              ///< weighted, pad
  std::int64_t workers = 2;                         ///< threads that read ahead; 0: the compute threads read
  std::int64_t prefetch = 2;                        ///< batches made ahead
  bool pin_memory = false;                          ///< does nothing without an accelerator
  std::string on_error = "raise";                   ///< raise, skip
  std::string empty_class = "raise";                ///< raise, keep
  std::string on_other_files = "warn";              ///< warn, raise
  std::string cache = "none";                       ///< none, encoded (the files' bytes stay in memory)
  std::int64_t synthetic_train = 1024;              ///< samples, of type synthetic
  std::int64_t synthetic_val = 256;                 ///< likewise
  std::map<std::string, std::string> options = {};  ///< passed to a registered data set as they are
  std::string sampler = "auto";  ///< auto, distributed, random, sequential, or a registered name
  std::map<std::string, std::string> sampler_options = {};  ///< passed to a registered sampler as they are
  bool operator==(const DataConfig&) const = default;
};

/// Section `optim`: the optimizer, its options, and clipping.
struct OptimConfig {
  std::string name = "sgd";         ///< sgd, adam, adamw
  double lr = 0.1;                  ///< as load_config() reads a file without it: default_lr(name)
  std::string lr_scaling = "none";  ///< none, linear, sqrt
  std::int64_t lr_base_size = 0;    ///< samples of a step that lr is for; 0: batch_size * accumulate
  double momentum = 0.9;
  bool nesterov = false;
  double weight_decay = 0.0;
  std::vector<double> betas = {0.9, 0.999};         ///< adam, adamw
  double eps = 1e-8;                                ///< adam, adamw: added to the denominator
  bool no_decay_on_norm_and_bias = false;           ///< biases and parameters of norms get no weight decay
  double clip_norm = 0.0;                           ///< 0: no clipping
  std::map<std::string, std::string> options = {};  ///< passed to a registered optimizer as they are
  bool operator==(const OptimConfig&) const = default;
};

/// Section `schedule`: the learning rate over the run.
struct ScheduleConfig {
  std::string name = "constant";  ///< constant, step, multistep, cosine, linear, one_cycle
  /// Of milestones and step_size, and how often the rate changes (warm-up: every step).
  std::string unit = "epoch";
  double warmup_epochs = 0.0;     ///< at most one of the three warm-ups is not zero
  std::int64_t warmup_steps = 0;  ///< in steps instead
  double warmup_fraction = 0.0;   ///< of all steps
  double warmup_start = 0.01;     ///< first factor of the warm-up
  /// Multistep: where the rate is multiplied by `gamma`.
  std::vector<std::int64_t> milestones = {30, 60, 80};
  std::int64_t step_size = 30;    ///< step: between two multiplications by `gamma`
  double gamma = 0.1;             ///< step, multistep: factor
  double eta_min = 0.0;           ///< cosine, linear: the rate at the end
  double pct_start = 0.3;         ///< this and what follows: one_cycle
  double div_factor = 25.0;       ///< peak over first rate
  double final_div_factor = 1e4;  ///< first over last rate
  std::string anneal = "cosine";  ///< cosine, linear
  bool three_phase = false;       ///< the fall to the first rate is a phase of its own
  bool cycle_momentum = true;     ///< momentum falls while the rate rises
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  std::map<std::string, std::string> options = {};  ///< passed to a registered schedule as they are
  bool operator==(const ScheduleConfig&) const = default;
};

/// Section `train`: steps, batches, evaluation and numbers.
struct TrainConfig {
  std::int64_t epochs = 90;
  std::int64_t max_steps = 0;                   ///< 0: no limit
  std::int64_t batch_size = 32;                 ///< of each rank, or virtual rank
  std::int64_t global_batch_size = 0;           ///< 0: batch_size * accumulate * ranks
  std::int64_t eval_batch_size = 0;             ///< 0: batch_size
  std::int64_t accumulate = 1;                  ///< batches whose gradients make one step
  double label_smoothing = 0.0;                 ///< share of the target that is spread over all classes
  std::string precision = "f32";                ///< f32, bf16
  std::string memory_format = "channels_last";  ///< channels_last, contiguous
  std::int64_t threads = 0;                     ///< 0: the cores this process may use
  std::string device = "auto";                  ///< auto, cpu, cuda, cuda:K
  std::int64_t eval_every = 1;        ///< epochs; the first and the last are evaluated too; 0: never
  std::int64_t max_eval_steps = 0;    ///< 0: the whole validation set
  bool script = false;                ///< the step is recorded and replayed
  std::string on_nonfinite = "stop";  ///< stop, continue
  bool operator==(const TrainConfig&) const = default;
};

/// Section `distributed`: the model's placements, and the ranks.
struct DistributedConfig {
  std::string model = "plain";     ///< plain, data_parallel, model_parallel, pipeline, or a registered name
  std::string gradients = "auto";  ///< auto, none, average, ddp, or a registered name
  std::string devices = {};  ///< placements of models that are not plain; empty: every core, or every GPU
  /// Layers and their placements; empty: cut by measuring.
  std::map<std::string, std::string> device_map = {};
  std::string schedule = "1f1b";        ///< fill_drain, 1f1b, interleaved_1f1b, zb_h1
  std::int64_t micro_batches = 4;       ///< parts that a pipeline cuts a batch into
  bool find_unused_parameters = false;  ///< parameters may have no part in a loss; else that is an error
  double bucket_cap_mb = 25;            ///< MiB of gradients that travel together
  std::string comm_hook = "none";       ///< none, fp16, bf16
  std::string backend = "auto";         ///< auto, or one of comm::backend_names()
  std::int64_t nproc_per_node = 1;      ///< ranks that are started here where no launcher has
  std::int64_t virtual_ranks = 0;       ///< a step has so many shares, on any number of processes; 0: off
  bool elastic = false;                 ///< processes may come and go; the agent's virtual ranks
  bool operator==(const DistributedConfig&) const = default;
};

/// Section `comm`: the ranks' collectives.
struct CommConfig {
  double timeout = 600;                     ///< seconds
  std::string check_consistency = "first";  ///< first, always, off
  bool operator==(const CommConfig&) const = default;
};

/// Section `run`: the run's folder, checkpoints and what is reported.
struct RunConfig {
  std::string name = {};              ///< empty: the model's name
  std::string dir = {};               ///< empty: a new folder runs/NAME-DATE-TIME, in UTC
  std::string resume = {};            ///< empty, auto, last, best, or a checkpoint folder
  std::int64_t seed = 1;              ///< of all that is random
  std::int64_t save_every = 1;        ///< epochs; the first and the last are saved too; 0: the last only
  std::int64_t save_every_steps = 0;  ///< between checkpoints; 0: none by step
  double save_every_minutes = 0.0;    ///< likewise, by time
  std::int64_t keep = 3;              ///< newest numbered checkpoints kept besides `last` and `best`; 0: all
  std::string checkpoint_format = "safetensors";  ///< or a registered name
  /// Metric that chooses `best`: val_accuracy, val_loss, or another of the task's.
  std::string best_metric = "val_accuracy";
  std::string best_mode = "auto";  ///< auto (as the name says), max, min
  std::int64_t log_every = 50;     ///< steps
  std::string progress = "auto";   ///< auto (a bar on a terminal), bar, plain, off
  bool tensorboard = true;         ///< whether event files are written
  std::int64_t log_images = 8;     ///< input images written to TensorBoard at the start
  std::int64_t trace = 0;          ///< steps recorded in trace.json
  std::int64_t profile = 0;        ///< steps whose operators are recorded in profile.json
  bool operator==(const RunConfig&) const = default;
};

/// A run's settings, section by section.
struct Config {
  ModelConfig model;
  DataConfig data;
  OptimConfig optim;
  ScheduleConfig schedule;
  TrainConfig train;
  DistributedConfig distributed;
  CommConfig comm;
  RunConfig run;
  std::vector<std::string> warnings;  ///< what the program should say; not part of the configuration
};

/// True when every setting is equal; warnings are not compared.
bool operator==(const Config& a, const Config& b);

/// Returns the transforms of training or evaluation in full: presets expanded, ToTensor and Normalize at the
/// end.
std::vector<TransformConfig> train_transforms(const DataConfig& config);
std::vector<TransformConfig> val_transforms(const DataConfig& config);

/// Return data.train and data.val, or path/train and path/val where they are empty.
std::string train_path(const DataConfig& config);
std::string val_path(const DataConfig& config);

/// Whether data.type is the folder of images, whose samples differ in size. A data set of a plug-in has sizes
/// and channels of its own, which the configuration does not know.
bool is_image_folder(const DataConfig& config);
/// Returns the channels of an image of data.color: 3 for rgb, 1 for gray. Throws: ConfigError for another
/// color.
std::int64_t image_channels(const DataConfig& config);

/// Returns the learning rate of a file that names `optimizer` and no optim.lr: 0.1 for sgd (0.01 in a flat
/// file), else 0.001, as in PyTorch.
double default_lr(const std::string& optimizer);

/// Return what `run.best_mode: auto` and `train.eval_batch_size: 0` come to.
bool best_is_max(const RunConfig& config);
std::int64_t eval_batch_size(const TrainConfig& config);

/// Returns run.name, or model.name where it is empty.
std::string run_name(const RunConfig& run, const ModelConfig& model);

}  // namespace cohort::config
