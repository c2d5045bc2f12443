// Boxes are sorted by score and laid out in columns, so that a kept box is compared with all later boxes
// column by column. A box is kept or dropped when its turn comes: only kept boxes take later boxes away.
// The threshold is rounded down to the boxes' type, where it then decides as the exact number would.
#include "cohort/ops/nms.h"

#include <ATen/ops/empty.h>

#include <cmath>
#include <vector>

#include "cohort/ops/internal/nms_kernel.h"
#include "cohort/ops/operator.h"

namespace cohort::ops {
namespace {

void check(const at::Tensor& boxes, const at::Tensor& scores, double iou_threshold) {
  const bool fits =
      boxes.dim() == 2 && boxes.size(1) == 4 && scores.dim() == 1 && scores.size(0) == boxes.size(0);
  if (!fits) {
    throw UsageError("ops.nms", base::concat("got boxes ", boxes.sizes(), " and scores ", scores.sizes(),
                                             ", expected [n, 4] and [n]"));
  }
  const at::ScalarType dtype = boxes.scalar_type();
  if ((dtype != at::kFloat && dtype != at::kDouble) || scores.scalar_type() != dtype) {
    throw UsageError("ops.nms", base::concat("got boxes of ", dtype, " and scores of ", scores.scalar_type(),
                                             ", expected float32 or float64, both alike"));
  }
  if (std::isnan(iou_threshold)) throw UsageError("ops.nms", "the threshold is not a number");
}

/// The largest float that is not above `number`: an overlap in float32 is more than one when it is more than
/// the other.
float rounded_down(double number) {
  const auto near = static_cast<float>(number);
  return static_cast<double>(near) > number ? std::nextafter(near, -HUGE_VALF) : near;
}

template <typename T>
std::vector<std::int64_t> kept_boxes(const at::Tensor& boxes, const at::Tensor& order, T threshold) {
  const std::int64_t count = boxes.size(0);
  const auto* rows = boxes.const_data_ptr<T>();
  const auto* places = order.const_data_ptr<std::int64_t>();
  std::vector<T> columns(static_cast<std::size_t>(5 * count));
  T* const left = columns.data();
  T* const top = left + count;
  T* const right = top + count;
  T* const bottom = right + count;
  T* const area = bottom + count;
  for (std::int64_t i = 0; i < count; ++i) {
    const T* row = rows + 4 * places[i];
    left[i] = row[0], top[i] = row[1], right[i] = row[2], bottom[i] = row[3];
    // As torchvision computes it: corners are points, not pixels, so no 1 is added.
    area[i] = (row[2] - row[0]) * (row[3] - row[1]);
  }
  const detail::Boxes<T> sorted{left, top, right, bottom, area, count};
  std::vector<std::uint8_t> suppressed(static_cast<std::size_t>(count), 0);
  std::vector<std::int64_t> kept;
  for (std::int64_t i = 0; i < count; ++i) {
    if (suppressed[static_cast<std::size_t>(i)] != 0) continue;
    kept.push_back(places[i]);
    detail::suppress_after(sorted, i, threshold, suppressed.data());
  }
  return kept;
}

at::Tensor nms_cpu(const at::Tensor& boxes, const at::Tensor& scores, double iou_threshold) {
  check(boxes, scores, iou_threshold);
  const at::Tensor rows = boxes.contiguous();
  const at::Tensor order =
      // Stable, so that equal scores keep the order of the boxes and the result can be repeated.
      std::get<1>(scores.sort(/*stable=*/true, /*dim=*/0, /*descending=*/true)).contiguous();
  const std::vector<std::int64_t> kept = boxes.scalar_type() == at::kFloat
                                             ? kept_boxes<float>(rows, order, rounded_down(iou_threshold))
                                             : kept_boxes<double>(rows, order, iou_threshold);
  at::Tensor result = at::empty({static_cast<std::int64_t>(kept.size())}, boxes.options().dtype(at::kLong));
  std::copy(kept.begin(), kept.end(), result.mutable_data_ptr<std::int64_t>());
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cohort, library) {
  // No meta function: how many are kept depends on the values.
  define(library, "nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor",
         {at::Tag::dynamic_output_shape})
      .cpu(&nms_cpu)
      .autocast(Autocast::kFloat32);
}

at::Tensor nms(const at::Tensor& boxes, const at::Tensor& scores, double iou_threshold) {
  static const auto op = find<at::Tensor(const at::Tensor&, const at::Tensor&, double)>("cohort::nms");
  return op.call(boxes, scores, iou_threshold);
}

}  // namespace cohort::ops
