#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cohort::script {

/// A piece of memory that is wanted from one moment to another, both included.
struct Lifetime {
  std::size_t bytes = 0;
  std::size_t first = 0;
  std::size_t last = 0;
};

/// Offsets of pieces in one block of memory: none that live at the same time overlap.
struct Packing {
  std::vector<std::int64_t> offsets;  ///< multiples of 64 bytes, as LibTorch's allocator has them
  std::size_t bytes = 0;              ///< of the whole block
};

/// Lays the largest piece first, each in the smallest gap between those that live while it does; while that
/// takes more bytes than live at once, tries again with the pieces that stick out first, for some
/// milliseconds. Source: Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020
/// (greedy by size); differs in taking the smallest gap that fits. Joslin and Clements, "Squeaky Wheel
/// Optimization", JAIR 10, 1999.
Packing pack(const std::vector<Lifetime>& pieces);

}  // namespace cohort::script
