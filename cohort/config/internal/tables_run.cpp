// A table: the rows of run.*, distributed.* and comm.*, as in tables_data.cpp. Most may change on resume,
// since they say where and how a run is computed, and not what. The seed may not, since every random number
// follows from it. Of names of model runners, gradient syncs and backends the table knows only that they are
// not empty: the registries say which exist.
#include "cohort/config/internal/tables.h"

namespace cohort::config {
namespace {

// The name becomes part of the run folder's name, so it must not lead out of runs/.
bool is_name(const std::string& text) {
  return text.find('/') == std::string::npos && text != "." && text != "..";
}

}  // namespace

// What is shown, and where files are, cannot matter on resume. How often something is saved or logged takes
// effect: the files of the run then look different from that step on, and the log says why.
std::vector<ConfigKey> run_keys() {
  return {
      {.name = "run.name",
       .target = [](Config& c) -> KeyTarget { return &c.run.name; },
       .on_resume = OnResume::kCannotMatter,
       .help = "Name of the run, in its folder's name and in titles; empty: model.name.",
       .form = "a name without /",
       .matches = is_name},
      {.name = "run.dir",
       .target = [](Config& c) -> KeyTarget { return &c.run.dir; },
       .on_resume = OnResume::kCannotMatter,
       .help = "Run folder; empty: a new one, runs/NAME-DATE-TIME, in UTC."},
      {.name = "run.resume",
       .target = [](Config& c) -> KeyTarget { return &c.run.resume; },
       .on_resume = OnResume::kCannotMatter,
       .help = "Continue from a checkpoint: auto (last, or a fresh start when there is none), last, best, or "
               "the path of "
               "a checkpoint folder; empty: a fresh start. --resume sets it."},
      // The bounds of a key are doubles, which hold each whole number up to kMany.
      {.name = "run.seed",
       .target = [](Config& c) -> KeyTarget { return &c.run.seed; },
       .on_resume = OnResume::kRejected,
       .help = "Everything random follows from it: initial values, order, transforms, dropout.",
       .min = 0,
       .max = kMany},
      {.name = "run.save_every",
       .target = [](Config& c) -> KeyTarget { return &c.run.save_every; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Epochs between checkpoints; the first and the last epoch are saved too. 0: none by epoch.",
       .min = 0,
       .max = 1e9},
      {.name = "run.save_every_steps",
       .target = [](Config& c) -> KeyTarget { return &c.run.save_every_steps; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Steps between checkpoints; 0: none by step.",
       .min = 0,
       .max = kMany},
      {.name = "run.save_every_minutes",
       .target = [](Config& c) -> KeyTarget { return &c.run.save_every_minutes; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Minutes between checkpoints; 0: none by time.",
       .min = 0,
       .max = 1e9},
      {.name = "run.keep",
       .target = [](Config& c) -> KeyTarget { return &c.run.keep; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Newest checkpoints that are kept, besides those that last and best point to; 0: all.",
       .min = 0,
       .max = 1e9},
      // Another format has another extension, so a run may have checkpoints of both.
      {.name = "run.checkpoint_format",
       .target = [](Config& c) -> KeyTarget { return &c.run.checkpoint_format; },
       .on_resume = OnResume::kTakesEffect,
       .help = "How checkpoints hold tensors: safetensors, or a format that a library given with --load "
               "registers.",
       .form = "the name of a tensor format",
       .matches = is_not_empty},
      {.name = "run.best_metric",
       .target = [](Config& c) -> KeyTarget { return &c.run.best_metric; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Metric by which best is chosen among evaluated epochs: val_accuracy, val_loss, or one of "
               "your own "
               "train step.",
       .form = "the name of a metric",
       .matches = is_not_empty},
      {.name = "run.best_mode",
       .target = [](Config& c) -> KeyTarget { return &c.run.best_mode; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Whether more or less of it is better; auto: as the name says (loss, error, rmse, accuracy, "
               "f1, ...).",
       .choices = {"auto", "max", "min"}},
      {.name = "run.log_every",
       .target = [](Config& c) -> KeyTarget { return &c.run.log_every; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Steps between rows of metrics.jsonl, points in TensorBoard and plain lines.",
       .min = 1,
       .max = kMany},
      {.name = "run.progress",
       .target = [](Config& c) -> KeyTarget { return &c.run.progress; },
       .on_resume = OnResume::kCannotMatter,
       .help = "What is shown while it runs; auto: a bar on a terminal, plain lines elsewhere.",
       .choices = {"auto", "bar", "plain", "off"}},
      {.name = "run.tensorboard",
       .target = [](Config& c) -> KeyTarget { return &c.run.tensorboard; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Write event files for TensorBoard."},
      {.name = "run.log_images",
       .target = [](Config& c) -> KeyTarget { return &c.run.log_images; },
       .on_resume = OnResume::kCannotMatter,
       .help = "Input images of the first batch that go to TensorBoard.",
       .min = 0,
       .max = 1024},
      {.name = "run.trace",
       .target = [](Config& c) -> KeyTarget { return &c.run.trace; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Steps recorded in trace.json (Chrome's trace format), from the first one on; 0: none.",
       .min = 0,
       .max = 1e6},
      {.name = "run.profile",
       .target = [](Config& c) -> KeyTarget { return &c.run.profile; },
       .on_resume = OnResume::kTakesEffect,
       .help =
           "Steps whose operators are counted and timed, after three that are not: a table at the end, and "
           "profile.json (Chrome's trace format), of rank 0; 0: none. The option --profile.",
       .min = 0,
       .max = 10000},
  };
}

// All may change on resume, since a run may continue on other hardware. `unused_values` lists Cohort's own
// runners and syncs for which a key has no effect: one of a library may read any of these keys.
std::vector<ConfigKey> distributed_keys() {
  return {
      {.name = "distributed.model",
       .target = [](Config& c) -> KeyTarget { return &c.distributed.model; },
       .on_resume = OnResume::kTakesEffect,
       .help =
           "How a rank runs its model: plain (as it is), data_parallel (a replica and a part of the batch "
           "on each device), model_parallel (some of the layers on each device), pipeline (the same, with "
           "micro-batches), or a runner that a library given with --load registers.",
       .form = "the name of a model runner",
       .matches = is_not_empty},
      {.name = "distributed.gradients",
       .target = [](Config& c) -> KeyTarget { return &c.distributed.gradients; },
       .on_resume = OnResume::kTakesEffect,
       .help = "How ranks come to the same gradients: none (one rank), ddp (averaged bucket by bucket while "
               "backward runs), average (averaged after backward), or one that a library given with --load "
               "registers. auto: none for one rank, average for a pipeline, else ddp.",
       .form = "the name of a gradient sync",
       .matches = is_not_empty},
      {.name = "distributed.devices",
       .target = [](Config& c) -> KeyTarget { return &c.distributed.devices; },
       .on_resume = OnResume::kTakesEffect,
       .help =
           "Placements of replicas or layers, such as cpu:0,cpu:1 or cuda:0,cuda:1 (core K of those that the "
           "process may use); empty: each core a placement, or each GPU.",
       .used_with = "distributed.model",
       .unused_values = {"plain"}},
      {.name = "distributed.device_map",
       .target = [](Config& c) -> KeyTarget { return &c.distributed.device_map; },
       .on_resume = OnResume::kTakesEffect,
       .help =
           "Layers by name, or the beginning of their names, and the placement of each, as in {features: "
           "cpu:0, classifier: cpu:1}; empty: layers are measured, and cut where placements hold the same "
           "(model_parallel) or take the same time (pipeline).",
       .used_with = "distributed.model",
       .unused_values = {"plain", "data_parallel"}},
      {.name = "distributed.schedule",
       .target = [](Config& c) -> KeyTarget { return &c.distributed.schedule; },
       .on_resume = OnResume::kTakesEffect,
       .help =
           "In which order micro-batches go through a pipeline: fill_drain, 1f1b, interleaved_1f1b, zb_h1 "
           "(docs/guide/pipeline.md), or a schedule that a library given with --load registers.",
       .form = "the name of a schedule",
       .matches = is_not_empty,
       .used_with = "distributed.model",
       .unused_values = {"plain", "data_parallel", "model_parallel"}},
      {.name = "distributed.micro_batches",
       .target = [](Config& c) -> KeyTarget { return &c.distributed.micro_batches; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Parts that a pipeline cuts a batch into.",
       .min = 1,
       .max = 4096,
       .used_with = "distributed.model",
       .unused_values = {"plain", "data_parallel", "model_parallel"}},
      // This key and the next two become ReducerOptions, and only `ddp` of Cohort's syncs has a reducer.
      // Virtual ranks take the second one for their sums.
      {.name = "distributed.find_unused_parameters",
       .target = [](Config& c) -> KeyTarget { return &c.distributed.find_unused_parameters; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Parameters may take no part in the loss of a step; else that is an error naming them.",
       .used_with = "distributed.gradients",
       .unused_values = {"none", "average"}},
      {.name = "distributed.bucket_cap_mb",
       .target = [](Config& c) -> KeyTarget { return &c.distributed.bucket_cap_mb; },
       .on_resume = OnResume::kTakesEffect,
       .help = "MiB of gradients that travel together, until times are measured.",
       .min = 0.001,
       .max = 1e6,
       .used_with = "distributed.gradients",
       .unused_values = {"none", "average"},
       .used_above_zero = "distributed.virtual_ranks"},
      {.name = "distributed.comm_hook",
       .target = [](Config& c) -> KeyTarget { return &c.distributed.comm_hook; },
       .on_resume = OnResume::kTakesEffect,
       .help = "What gradients are rounded to on their way: none, fp16, bf16, or a communication hook that a "
               "library given with --load registers.",
       .form = "the name of a communication hook",
       .matches = is_not_empty,
       .used_with = "distributed.gradients",
       .unused_values = {"none", "average"}},
      // auto is chosen after the rendezvous: only then is it known whether all ranks are on one host.
      {.name = "distributed.backend",
       .target = [](Config& c) -> KeyTarget { return &c.distributed.backend; },
       .on_resume = OnResume::kTakesEffect,
       .help = "What carries tensors between ranks: shm (CPU, one host), gloo (CPU), mpi (CPU, under "
               "mpirun), nccl "
               "(GPUs), auto.",
       .form = "the name of a backend",
       .matches = is_not_empty},
      // A launcher's number wins: join_ranks() warns where both are set and differ.
      {.name = "distributed.nproc_per_node",
       .target = [](Config& c) -> KeyTarget { return &c.distributed.nproc_per_node; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Ranks that cohort train starts on this host, when no launcher has started it; "
               "--nproc-per-node sets it.",
       .min = 1,
       .max = 4096},
      // What a step is made of: the parameters of the run are those of so many virtual ranks.
      {.name = "distributed.virtual_ranks",
       .target = [](Config& c) -> KeyTarget { return &c.distributed.virtual_ranks; },
       .on_resume = OnResume::kRejected,
       .help =
           "A step has so many virtual ranks, which 1 to as many processes compute, with the same bits for "
           "any number of them (docs/guide/elastic.md). train.batch_size is then of a virtual rank. 0: a "
           "rank is a process. Only with a runner and a gradient sync that support them: of Cohort's own "
           "distributed.model plain, and distributed.gradients auto, average or ddp.",
       .min = 0,
       .max = 4096},
      // The same bits as with so many virtual ranks and without it.
      {.name = "distributed.elastic",
       .target = [](Config& c) -> KeyTarget { return &c.distributed.elastic; },
       .on_resume = OnResume::kTakesEffect,
       .help =
           "Processes may come, leave and die while the run trains, which ends with the bits of an "
           "undisturbed run "
           "(docs/guide/elastic.md). cohort run --elastic starts them, and gives "
           "distributed.virtual_ranks. Needs "
           "run.dir; resumes from its last checkpoint. Only with a runner and a gradient sync that support "
           "virtual ranks."},
  };
}

// None can matter on resume: they decide when a fault is seen, not what is computed.
std::vector<ConfigKey> comm_keys() {
  return {
      {.name = "comm.timeout",
       .target = [](Config& c) -> KeyTarget { return &c.comm.timeout; },
       .on_resume = OnResume::kCannotMatter,
       .help = "Seconds that ranks wait for each other, in the rendezvous and in each collective.",
       .min = 0,
       .max = 1e9,
       .min_is_open = true},
      {.name = "comm.check_consistency",
       .target = [](Config& c) -> KeyTarget { return &c.comm.check_consistency; },
       .on_resume = OnResume::kCannotMatter,
       .help =
           "When ranks compare what they call before they do it: in the first ten steps, always, or never.",
       .choices = {"first", "always", "off"}},
  };
}

}  // namespace cohort::config
