// Ranges are checked one by one, so that a message names one option and its value. Sizes that follow from
// each other are filled in once, so the loader reads both. Always: an order that leaves here has only
// indices of the dataset, which later code uses without a check.
#include "cohort/data/internal/loader_setup.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <string>
#include <typeinfo>

#include "cohort/base/error.h"
#include "cohort/base/log.h"

namespace cohort::data {
namespace {

void expect_option(bool condition, const std::string& what, const std::string& hint = "") {
  if (!condition) throw UsageError("data.loader", what, hint);
}

}  // namespace

void check_loader_options(const Dataset& dataset, const LoaderOptions& o) {
  using base::concat;
  expect_option(o.batch_size >= 1, concat("batch_size is ", o.batch_size, ", expected at least 1"));
  expect_option(o.global_batch_size >= 0,
                concat("global_batch_size is ", o.global_batch_size, ", expected 0 or more"));
  expect_option(o.workers >= 0 && o.workers <= 1024,
                concat("workers is ", o.workers, ", expected 0 to 1024"));
  expect_option(o.prefetch >= 1 || (o.workers == 0 && o.prefetch == 0),
                concat("prefetch is ", o.prefetch, ", expected at least 1"),
                "workers: 0 to read nothing ahead");
  expect_option(o.world_size >= 1, concat("world_size is ", o.world_size, ", expected at least 1"));
  expect_option(o.rank >= 0 && o.rank < o.world_size,
                concat("rank is ", o.rank, ", expected 0 to ", o.world_size - 1));
  expect_option(o.parts >= 1, concat("parts is ", o.parts, ", expected at least 1"));
  expect_option(
      o.parts == 1 || o.on_error == OnError::kRaise,
      "parts are asked for together with on_error: skip, which changes how many samples a batch has while "
      "it is used",
      "on_error: raise, or one part");
  expect_option(o.timeout.count() > 0, concat("timeout is ", o.timeout.count(), " ms, expected more than 0"));
  expect_option(o.stop_grace.count() >= 0,
                concat("stop_grace is ", o.stop_grace.count(), " ms, expected 0 or more"));
  expect_option(dataset.size() > 0, "the dataset has no samples");
  const std::vector<Field> fields = dataset.fields();
  expect_option(!fields.empty(), "the dataset has no fields");
  for (const Field& field : fields) {
    expect_option(!field.channels_last || field.shape.size() == 3,
                  concat("field '", field.name, "' is channels_last and has ", field.shape.size(),
                         " dimensions, expected 3"));
  }
}

std::shared_ptr<const Sampler> sampler_of(std::int64_t size, const LoaderOptions& options) {
  if (options.sampler != nullptr) return options.sampler;
  return std::make_shared<DistributedSampler>(
      size, DistributedSamplerOptions{options.world_size, options.shuffle, options.seed, options.last_batch});
}

std::vector<std::int64_t> checked_order(const Sampler& sampler, std::int64_t epoch, std::int64_t samples) {
  std::vector<std::int64_t> order = sampler.order(epoch);
  const auto wrong = [&](const auto&... what) {
    return UsageError("data.loader", base::concat("sampler ", c10::demangle(typeid(sampler).name()), ": ",
                                                  "order(", epoch, ") ", what...));
  };
  if (std::ssize(order) != sampler.size()) {
    throw wrong("has ", order.size(), " indices, expected ", sampler.size(), ", its size()");
  }
  const auto outside = [samples](std::int64_t index) { return index < 0 || index >= samples; };
  // The whole order at once: a sample of it is read much later, on a thread that cannot name the sampler.
  if (const auto bad = std::ranges::find_if(order, outside); bad != order.end()) {
    throw wrong("has index ", *bad, " at position ", bad - order.begin(), ", expected 0 to ", samples - 1,
                ": the dataset has ", samples, " samples");
  }
  return order;
}

LoaderOptions with_both_sizes(LoaderOptions options) {
  if (options.global_batch_size == 0) {
    options.global_batch_size = options.batch_size * options.world_size;
  } else {
    // The largest share: where ranks do not divide the global batch, some have one sample less.
    options.batch_size = (options.global_batch_size + options.world_size - 1) / options.world_size;
  }
  return options;
}

// The accelerator's driver locks the pages, so without an accelerator there is nobody to ask.
bool use_pinned_memory(const LoaderOptions& options) {
  if (!options.pin_memory) return false;
  if (at::accelerator::getAccelerator().has_value() && at::accelerator::deviceCount() > 0) return true;
  base::warn_once("data.pin_memory", "pin_memory has no effect: this LibTorch sees no accelerator");
  return false;
}

}  // namespace cohort::data
