#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cohort/data/dataset.h"
#include "cohort/data/loader_options.h"

/// What a loader is asked for, checked. Internal to Loader.
namespace cohort::data {

/// Throws: UsageError with `what` unless `condition`.
void require_of_loader(bool condition, const std::string& what, const std::string& hint = "");

/// Throws: UsageError for shares [rank, rank + num_shares) that are not among `world_size`.
void check_shares(std::int64_t rank, std::int64_t num_shares, std::int64_t world_size);

/// Throws: UsageError naming the option and its value.
void check_loader_options(const Dataset& dataset, const LoaderOptions& options);

/// Returns `options` with batch_size and global_batch_size, each from the other.
LoaderOptions with_both_sizes(LoaderOptions options);

/// Returns the sampler of `options`, or the one that their other fields ask for.
std::shared_ptr<const Sampler> sampler_of(std::int64_t size, const LoaderOptions& options);

/// Returns the order of an epoch, of a data set with `samples`. Throws: UsageError naming the sampler, where
/// its order has an index that is not in the data set, or another length than it says.
std::vector<std::int64_t> checked_order(const Sampler& sampler, std::int64_t epoch, std::int64_t samples);

}  // namespace cohort::data
