#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cohort/data/dataset.h"
#include "cohort/data/loader_options.h"

/// What a loader makes of its options before it reads. Internal.
namespace cohort::data {

/// Throws: UsageError naming the option, or what is wrong with the dataset.
void check_loader_options(const Dataset& dataset, const LoaderOptions& options);

/// Returns the options with batch_size and global_batch_size, each from the other.
LoaderOptions with_both_sizes(LoaderOptions options);

/// Returns the sampler of the options, or the one that they describe, for `size` samples.
std::shared_ptr<const Sampler> sampler_of(std::int64_t size, const LoaderOptions& options);

/// Returns the order of an epoch. A sampler of the user's may have got it wrong, and an index beyond the
/// dataset would be read from foreign memory. Throws: UsageError naming the sampler.
std::vector<std::int64_t> checked_order(const Sampler& sampler, std::int64_t epoch, std::int64_t samples);

/// Whether batches lie in page-locked memory: where it is asked for, and there is an accelerator.
bool use_pinned_memory(const LoaderOptions& options);

}  // namespace cohort::data
