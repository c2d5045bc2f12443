#pragma once

#include <cstdint>
#include <functional>

#include "cohort/data/loader.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"

namespace cohort::train {

/// Begins a step of the virtual ranks whose shares `batch` has: from here on each Batch::advance() that comes
/// to another share tells `sync`. `begin_share` is called with the share before anything of it is computed.
/// `sync` must outlive the batch's parts.
/// `take_part` is called with each part, where it is given.
void go_through_shares(data::Batch& batch, parallel::VirtualRankSync& sync,
                       std::function<void(std::int64_t share)> begin_share,
                       std::function<void(const data::Batch& part)> take_part = nullptr);

}  // namespace cohort::train
