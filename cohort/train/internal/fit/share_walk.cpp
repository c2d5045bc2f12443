#include "cohort/train/internal/fit/share_walk.h"

#include <memory>
#include <utility>

namespace cohort::train {
namespace {

/// Where a step is among the shares of its batch. The batch's function holds it, which may outlive the step.
class ShareWalk : public std::enable_shared_from_this<ShareWalk> {
 public:
  ShareWalk(parallel::VirtualRankSync& sync, std::function<void(std::int64_t)> begin_share,
            std::function<void(const data::Batch&)> take_part)
      : sync_(sync), begin_share_(std::move(begin_share)), take_part_(std::move(take_part)) {}

  /// `batch` is a part that was just put in its place.
  void enter(data::Batch& batch) {
    if (batch.share != share_) {
      share_ = batch.share;
      sync_.begin_share(batch.share, batch.whole_size);
      begin_share_(batch.share);
    }
    if (take_part_) take_part_(batch);
    if (batch.take_next == nullptr) return sync_.end_shares();
    batch.take_next = [walk = shared_from_this(), take = std::move(batch.take_next)](data::Batch& part) {
      if (!take(part)) {
        walk->sync_.end_shares();
        return false;
      }
      walk->enter(part);
      return true;
    };
  }

 private:
  parallel::VirtualRankSync& sync_;
  const std::function<void(std::int64_t)> begin_share_;
  const std::function<void(const data::Batch&)> take_part_;
  std::int64_t share_ = -1;
};

}  // namespace

void go_through_shares(data::Batch& batch, parallel::VirtualRankSync& sync,
                       std::function<void(std::int64_t share)> begin_share,
                       std::function<void(const data::Batch& part)> take_part) {
  sync.begin_step();
  std::make_shared<ShareWalk>(sync, std::move(begin_share), std::move(take_part))->enter(batch);
}

}  // namespace cohort::train
