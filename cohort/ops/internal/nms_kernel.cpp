#include "cohort/ops/internal/nms_kernel.h"

#include "cohort/core/vector_clones.h"

namespace cohort::ops::detail {
namespace {

// Always inlined: COHORT_VECTOR_CLONES compiles a function once for each instruction set, but not what it
// calls.
template <typename T>
inline __attribute__((always_inline)) void suppress(const T* __restrict left, const T* __restrict top,
                                                    const T* __restrict right, const T* __restrict bottom,
                                                    const T* __restrict area, std::int64_t count,
                                                    std::int64_t i, T threshold,
                                                    std::uint8_t* __restrict suppressed) {
  const T my_left = left[i], my_top = top[i], my_right = right[i], my_bottom = bottom[i], my_area = area[i];
  for (std::int64_t j = i + 1; j < count; ++j) {
    // No branches in the loop, also none for boxes that are suppressed already, so that it runs on vectors.
    const T l = left[j] > my_left ? left[j] : my_left;
    const T t = top[j] > my_top ? top[j] : my_top;
    const T r = right[j] < my_right ? right[j] : my_right;
    const T b = bottom[j] < my_bottom ? bottom[j] : my_bottom;
    const T width = r - l > T(0) ? r - l : T(0);
    const T height = b - t > T(0) ? b - t : T(0);
    const T both = width * height;
    // Two boxes without area give 0 / 0, and NaN is not above the threshold: both stay.
    const T overlap = both / (my_area + area[j] - both);
    suppressed[j] = static_cast<std::uint8_t>(suppressed[j] | static_cast<std::uint8_t>(overlap > threshold));
  }
}

}  // namespace

COHORT_VECTOR_CLONES void suppress_after(const Boxes<float>& boxes, std::int64_t i, float threshold,
                                         std::uint8_t* suppressed) {
  suppress(boxes.left, boxes.top, boxes.right, boxes.bottom, boxes.area, boxes.count, i, threshold,
           suppressed);
}

COHORT_VECTOR_CLONES void suppress_after(const Boxes<double>& boxes, std::int64_t i, double threshold,
                                         std::uint8_t* suppressed) {
  suppress(boxes.left, boxes.top, boxes.right, boxes.bottom, boxes.area, boxes.count, i, threshold,
           suppressed);
}

}  // namespace cohort::ops::detail
