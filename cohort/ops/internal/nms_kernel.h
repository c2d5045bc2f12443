#pragma once

#include <cstdint>

/// The loop of ops/nms.h over plain memory.
namespace cohort::ops::detail {

/// Boxes as columns, in the order in which they are looked at.
template <typename T>
struct Boxes {
  const T* left;
  const T* top;
  const T* right;
  const T* bottom;
  const T* area;
  std::int64_t count;
};

/// Sets suppressed[j] for each box j after `i` that overlaps box `i` by more than `threshold`.
void suppress_after(const Boxes<float>& boxes, std::int64_t i, float threshold, std::uint8_t* suppressed);
void suppress_after(const Boxes<double>& boxes, std::int64_t i, double threshold, std::uint8_t* suppressed);

}  // namespace cohort::ops::detail
