// A table: the rows of model.* and data.*, in the order in which a dump writes them. Parser, dump, reference
// and resume are all driven by it, so a new key is a field of Config and a row here. A bound with an exponent
// guards against overflow; it is not advice. A row says kRejected where another value would change which
// samples or which parameters the checkpoint's step meant.
//
// Which names exist is known to the registries of other modules, which this module may not include. They also
// grow with each plug-in. So an unknown name is an error of the registry, not of the table.
#include "cohort/config/internal/tables.h"

namespace cohort::config {
namespace {

// A data set that a library registers makes its samples as it likes. The keys of images are without effect
// for it, which warn_unused() says.
std::vector<std::string> own_types() {
  return {"image_folder", "idx", "synthetic"};
}

}  // namespace

std::vector<ConfigKey> model_keys() {
  return {
      {.name = "model.name",
       .target = [](Config& c) -> KeyTarget { return &c.model.name; },
       .on_resume = OnResume::kRejected,
       .help = "Model: vgg11, vgg13, vgg16, vgg19 (each also with _bn), resnet18, resnet34, resnet50, mlp, "
               "lenet5, "
               "or one that a library given with --load registers.",
       .form = "the name of a model",
       .matches = is_not_empty},
      {.name = "model.num_classes",
       .target = [](Config& c) -> KeyTarget { return &c.model.num_classes; },
       .on_resume = OnResume::kRejected,
       .help = "Classes that the model tells apart; 0: counted in the data.",
       .min = 0,
       .max = 1e7},
      {.name = "model.width",
       .target = [](Config& c) -> KeyTarget { return &c.model.width; },
       .on_resume = OnResume::kRejected,
       .help = "Factor on the number of channels of each VGG layer.",
       .min = 0,
       .max = 64,
       .min_is_open = true},
      {.name = "model.pools",
       .target = [](Config& c) -> KeyTarget { return &c.model.pools; },
       .on_resume = OnResume::kRejected,
       .help = "How many of VGG's five poolings there are; the last ones are left out first.",
       .min = 0,
       .max = 5},
      {.name = "model.head",
       .target = [](Config& c) -> KeyTarget { return &c.model.head; },
       .on_resume = OnResume::kRejected,
       .help =
           "What stands on the convolutions: the model's own head, or global average pooling and one linear "
           "layer.",
       .choices = {"default", "linear"}},
      {.name = "model.dropout",
       .target = [](Config& c) -> KeyTarget { return &c.model.dropout; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Probability with which VGG's default head drops a value.",
       .min = 0,
       .max = 1},
      // A resumed run takes its parameters from the checkpoint.
      {.name = "model.weights",
       .target = [](Config& c) -> KeyTarget { return &c.model.weights; },
       .on_resume = OnResume::kCannotMatter,
       .help =
           "What to start from: a run folder (its best checkpoint, or its last where none was the best), "
           "a checkpoint folder or a .safetensors file; empty: initial values from run.seed. Not read where "
           "a checkpoint of the run has the parameters."},
      {.name = "model.options",
       .target = [](Config& c) -> KeyTarget { return &c.model.options; },
       .on_resume = OnResume::kRejected,
       .help = "Names and values for a registered model, or of one model only (mlp: hidden)."},
  };
}

std::vector<ConfigKey> data_keys() {
  return {
      {.name = "data.type",
       .target = [](Config& c) -> KeyTarget { return &c.data.type; },
       .on_resume = OnResume::kRejected,
       .help =
           "Where samples come from: image_folder (a folder per class), idx (MNIST's files), synthetic, or a "
           "data set that a library given with --load registers.",
       .form = "the name of a kind of data set",
       .matches = is_not_empty},
      // Data may have moved. Its classes, the number of samples and a fingerprint say whether it is still the
      // same.
      {.name = "data.path",
       .target = [](Config& c) -> KeyTarget { return &c.data.path; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Folder with train/ and val/ (image_folder), or with the files (idx). Relative to where the "
               "program "
               "is started."},
      {.name = "data.train",
       .target = [](Config& c) -> KeyTarget { return &c.data.train; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Training data, where it is not data.path/train."},
      {.name = "data.val",
       .target = [](Config& c) -> KeyTarget { return &c.data.val; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Validation data, where it is not data.path/val."},
      {.name = "data.color",
       .target = [](Config& c) -> KeyTarget { return &c.data.color; },
       .on_resume = OnResume::kRejected,
       .help = "What images are turned into: three channels or one.",
       .choices = {"rgb", "gray"},
       .used_with = "data.type",
       .used_values = own_types()},
      {.name = "data.image_size",
       .target = [](Config& c) -> KeyTarget { return &c.data.image_size; },
       .on_resume = OnResume::kRejected,
       .help = "Height and width of what the model sees, in pixels; the presets of the transforms use it.",
       .min = 1,
       .max = 16384,
       .used_with = "data.type",
       .used_values = own_types()},
      {.name = "data.train_transforms",
       .target = [](Config& c) -> KeyTarget { return &c.data.train_transforms; },
       .on_resume = OnResume::kTakesEffect,
       .help = "What is done to training images, in order; a preset, or a list.",
       .choices = {"auto", "none", "resize", "flip", "crop_flip", "imagenet"},
       .used_with = "data.type",
       .used_values = own_types()},
      {.name = "data.val_transforms",
       .target = [](Config& c) -> KeyTarget { return &c.data.val_transforms; },
       .on_resume = OnResume::kTakesEffect,
       .help = "What is done to validation images, in order; a preset, or a list.",
       .choices = {"auto", "none", "resize", "imagenet"},
       .used_with = "data.type",
       .used_values = own_types()},
      {.name = "data.mean",
       .target = [](Config& c) -> KeyTarget { return &c.data.mean; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Mean of each channel (pixels are 0..1), taken off by Normalize; empty: no Normalize. `cohort "
               "data "
               "stats` computes it.",
       .min = -1e6,
       .max = 1e6,
       .used_with = "data.type",
       .used_values = own_types()},
      {.name = "data.std",
       .target = [](Config& c) -> KeyTarget { return &c.data.std; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Standard deviation of each channel, divided by in Normalize; as many as data.mean.",
       .min = 0,
       .max = 1e6,
       .min_is_open = true,
       .used_with = "data.type",
       .used_values = own_types()},
      // The order of an epoch, and so the samples of a step, follow from this key and the next two.
      {.name = "data.shuffle",
       .target = [](Config& c) -> KeyTarget { return &c.data.shuffle; },
       .on_resume = OnResume::kRejected,
       .help = "A new order of the training samples in each epoch, made from run.seed + epoch.",
       .used_with = "data.sampler",
       .unused_values = {"random", "sequential"}},
      {.name = "data.drop_last",
       .target = [](Config& c) -> KeyTarget { return &c.data.drop_last; },
       .on_resume = OnResume::kRejected,
       .help = "Leave out the last training batch of an epoch when it is not full."},
      {.name = "data.last_batch",
       .target = [](Config& c) -> KeyTarget { return &c.data.last_batch; },
       .on_resume = OnResume::kRejected,
       .help =
           "What several ranks do with a last batch that they do not divide: weighted (shares differ by one "
           "sample, gradients are weighted by samples, nothing is repeated), or pad (samples from the start "
           "of the epoch are repeated, as PyTorch's DistributedSampler does).",
       .choices = {"weighted", "pad"},
       .used_with = "data.sampler",
       .unused_values = {"random", "sequential"}},
      // What a batch holds never depends on threads or on time, so workers and prefetch cannot matter.
      {.name = "data.workers",
       .target = [](Config& c) -> KeyTarget { return &c.data.workers; },
       .on_resume = OnResume::kCannotMatter,
       .help =
           "Threads that read and transform while the step computes; 0: the compute threads do it between "
           "steps. The numbers are the same for any.",
       .min = 0,
       .max = 1024},
      {.name = "data.prefetch",
       .target = [](Config& c) -> KeyTarget { return &c.data.prefetch; },
       .on_resume = OnResume::kCannotMatter,
       .help = "Batches made ahead of the one in use.",
       .min = 1,
       .max = 1024},
      {.name = "data.pin_memory",
       .target = [](Config& c) -> KeyTarget { return &c.data.pin_memory; },
       .on_resume = OnResume::kCannotMatter,
       .help =
           "Batches in page-locked memory, copied while the last step runs. Without an accelerator it does "
           "nothing, and that is logged once."},
      // A run that a broken image has ended can resume with skip.
      {.name = "data.on_error",
       .target = [](Config& c) -> KeyTarget { return &c.data.on_error; },
       .on_resume = OnResume::kTakesEffect,
       .help = "An image that cannot be read ends the run, or is left out, named and counted.",
       .choices = {"raise", "skip"}},
      {.name = "data.empty_class",
       .target = [](Config& c) -> KeyTarget { return &c.data.empty_class; },
       .on_resume = OnResume::kRejected,
       .help = "A class folder without images ends the run, or stays a class without samples.",
       .choices = {"raise", "keep"},
       .used_with = "data.type",
       .used_values = {"image_folder"}},
      {.name = "data.on_other_files",
       .target = [](Config& c) -> KeyTarget { return &c.data.on_other_files; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Files of an image folder that are no JPEG or PNG are counted and named once, or end the run.",
       .choices = {"warn", "raise"},
       .used_with = "data.type",
       .used_values = {"image_folder"}},
      {.name = "data.cache",
       .target = [](Config& c) -> KeyTarget { return &c.data.cache; },
       .on_resume = OnResume::kCannotMatter,
       .help = "Keep the bytes of the image files in memory after the first read.",
       .choices = {"none", "encoded"},
       .used_with = "data.type",
       .used_values = {"image_folder"}},
      {.name = "data.synthetic_train",
       .target = [](Config& c) -> KeyTarget { return &c.data.synthetic_train; },
       .on_resume = OnResume::kRejected,
       .help = "Training samples that are made up.",
       .min = 1,
       .max = kMany,
       .used_with = "data.type",
       .used_values = {"synthetic"}},
      // No step reads validation samples, so their number may change.
      {.name = "data.synthetic_val",
       .target = [](Config& c) -> KeyTarget { return &c.data.synthetic_val; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Validation samples that are made up.",
       .min = 1,
       .max = kMany,
       .used_with = "data.type",
       .used_values = {"synthetic"}},
      {.name = "data.options",
       .target = [](Config& c) -> KeyTarget { return &c.data.options; },
       .on_resume = OnResume::kTakesEffect,
       .help = "Names and values for a registered data set."},
      {.name = "data.sampler",
       .target = [](Config& c) -> KeyTarget { return &c.data.sampler; },
       .on_resume = OnResume::kRejected,
       .help = "In which order training samples are read: distributed (PyTorch's DistributedSampler), random "
               "(its RandomSampler), sequential, or a sampler that a library given with --load registers. "
               "auto: distributed.",
       .form = "the name of a sampler",
       .matches = is_not_empty},
      {.name = "data.sampler_options",
       .target = [](Config& c) -> KeyTarget { return &c.data.sampler_options; },
       .on_resume = OnResume::kRejected,
       .help = "Names and values for a registered sampler."},
  };
}

}  // namespace cohort::config
