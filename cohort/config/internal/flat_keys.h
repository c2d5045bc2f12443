#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/config/types.h"

/// The flat upper-case keys of published VGG training scripts (MODEL, BATCHSIZE, LR, ...).
namespace cohort::config {

/// A flat key and what it stands for.
struct FlatKey {
  const char* name;
  const char* key;   ///< the key that it sets; empty for NUM_GPUS, which sets no key by itself
  const char* help;  ///< default and meaning
};

/// Returns every flat key.
std::span<const FlatKey> flat_keys();
/// Returns the flat key named `name`, or null.
const FlatKey* find_flat_key(std::string_view name);

/// Sets what a flat file means where it says nothing: its defaults, its transforms and its schedule.
void set_flat_defaults(Config& config);

/// Returns `text` with a space put in after the colon of lines such as `TRAIN_FILE:./data/train`, as some
/// scripts were published; adds a warning that shows each such line.
std::string repair_flat_text(std::string_view text, const std::string& name,
                             std::vector<std::string>& warnings);

}  // namespace cohort::config
