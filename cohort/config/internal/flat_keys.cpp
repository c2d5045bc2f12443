// A table gives each flat key the key that it sets; defaults of flat files are set before the first key is
// read. A missing space is repaired only where a flat key stands before the colon, so other YAML stays as it
// is. A flat file means the same as in the published scripts, so its defaults are theirs, not Cohort's.
#include "cohort/config/internal/flat_keys.h"

#include <array>

#include "cohort/base/error.h"

namespace cohort::config {
namespace {

using base::concat;

constexpr std::array kKeys = {
    FlatKey{"MODEL", "model.name", "vgg16. Upper or lower case."},
    FlatKey{"NUM_CLASSES", "model.num_classes", "counted in the training folder."},
    FlatKey{"IMAGE_SIZE", "data.image_size", "64."},
    FlatKey{"BATCHSIZE", "train.batch_size", "32. Per process."},
    FlatKey{"NUM_GPUS", "",
            "1. So many processes train, each on a GPU of its own, or on its share of the cores where "
            "there is no "
            "GPU. 0 computes on the CPU, in one process."},
    FlatKey{"EPOCHS", "train.epochs", "90."},
    FlatKey{"LR", "optim.lr", "0.01; 0.001 with adam and adamw."},
    FlatKey{"MOMENTUM", "optim.momentum", "0.9."},
    FlatKey{"WD", "optim.weight_decay", "0.0005."},
    FlatKey{"WEIGHT_DECAY", "optim.weight_decay", "the same as WD. Both may stand when they are equal."},
    FlatKey{"MILESTONES", "schedule.milestones", "[30, 60, 80], in epochs."},
    FlatKey{"GAMMA", "schedule.gamma", "0.1."},
    FlatKey{"WORKERS", "data.workers", "8."},
    FlatKey{"PIN_MEMORY", "data.pin_memory",
            "true. Without an accelerator it does nothing, which is logged once."},
    FlatKey{"SAVE_FREQUENCY", "run.save_every", "5, in epochs; the first and the last are saved too."},
    FlatKey{"LOG_FREQUENCY", "run.log_every", "100, in steps."},
    FlatKey{"EVAL_FREQUENCY", "train.eval_every", "10, in epochs; the first and the last are evaluated too."},
    FlatKey{"DATA_PATH", "data.path", "data."},
    FlatKey{"TRAIN_FILE", "data.train", "DATA_PATH/train. A folder; it wins over DATA_PATH."},
    FlatKey{"TEST_FILE", "data.val", "DATA_PATH/val. A folder; it wins over DATA_PATH."},
    FlatKey{"SEED", "run.seed", "1."},
};

}  // namespace

std::span<const FlatKey> flat_keys() {
  return kKeys;
}

const FlatKey* find_flat_key(std::string_view name) {
  for (const FlatKey& key : kKeys) {
    if (name == key.name) return &key;
  }
  return nullptr;
}

// Each value is what the published VGG scripts use where their file says nothing. Cohort's own defaults may
// change; these may not, as results of flat files are compared with those of the scripts.
void set_flat_defaults(Config& config) {
  config.model.name = "vgg16";
  config.data.image_size = 64;
  config.data.train_transforms = {.preset = "imagenet", .list = {}};
  config.data.val_transforms = {.preset = "imagenet", .list = {}};
  // Mean and deviation of ImageNet's training images, as torchvision's models use them.
  config.data.mean = {0.485, 0.456, 0.406};
  config.data.std = {0.229, 0.224, 0.225};
  config.data.workers = 8;
  config.data.pin_memory = true;
  config.optim.name = "sgd";
  config.optim.lr = 0.01;
  config.optim.momentum = 0.9;
  config.optim.weight_decay = 5e-4;
  config.schedule.name = "multistep";
  config.schedule.unit = "epoch";
  config.schedule.milestones = {30, 60, 80};
  config.schedule.gamma = 0.1;
  config.train.epochs = 90;
  config.train.batch_size = 32;
  config.train.eval_every = 10;
  config.run.seed = 1;
  config.run.save_every = 5;
  config.run.log_every = 100;
}

std::string repair_flat_text(std::string_view text, const std::string& name,
                             std::vector<std::string>& warnings) {
  std::string repaired;
  repaired.reserve(text.size() + 16);
  for (std::size_t line_number = 1; !text.empty(); ++line_number) {
    const std::size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);

    // Only a flat key at the first column counts, so a colon in a path or in a nested block stays as it is.
    const std::size_t colon = line.find(':');
    const bool has_value = colon != std::string_view::npos && colon + 1 < line.size();
    // A carriage return after the colon is the end of a line of Windows, not a value.
    const char next = has_value ? line[colon + 1] : ' ';
    if (next != ' ' && next != '\t' && next != '\r' && find_flat_key(line.substr(0, colon)) != nullptr) {
      repaired += concat(line.substr(0, colon + 1), " ", line.substr(colon + 1));
      warnings.push_back(concat(name, ", line ", line_number, ": no space after the colon in '", line,
                                "': read as '", line.substr(0, colon + 1), " ", line.substr(colon + 1), "'"));
    } else {
      repaired += line;
    }
    if (end != std::string_view::npos) repaired += '\n';
  }
  return repaired;
}

}  // namespace cohort::config
