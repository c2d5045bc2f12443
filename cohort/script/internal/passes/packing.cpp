// Offsets for pieces of memory whose lifetimes are known. The largest piece is laid first, each in the
// smallest gap that fits between the pieces that live meanwhile. No packing is smaller than the most bytes
// that live at once. While the result is larger, the pieces that reach its top go to the front of the order,
// and all are laid again. Always: the best packing so far is kept, so another try does no harm. A try takes
// time in the square of the pieces, so their number is limited by work. Sources: packing.h.
#include "cohort/script/internal/passes/packing.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace cohort::script {
namespace {

constexpr std::size_t kAlignment = 64;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

using Order = std::vector<std::size_t>;

// Each piece, in this order, in the smallest gap between those that live while it does.
Packing pack_in(const Order& order, const std::vector<Lifetime>& pieces) {
  Packing result;
  result.offsets.resize(pieces.size());
  std::vector<std::pair<std::size_t, std::size_t>> taken;  // begin and end, of those that live meanwhile
  for (std::size_t done = 0; done < order.size(); ++done) {
    const Lifetime& piece = pieces[order[done]];
    const std::size_t bytes = aligned(piece.bytes);
    taken.clear();
    for (std::size_t i = 0; i < done; ++i) {
      const Lifetime& other = pieces[order[i]];
      if (other.last < piece.first || piece.last < other.first) continue;
      const auto begin = static_cast<std::size_t>(result.offsets[order[i]]);
      taken.emplace_back(begin, begin + aligned(other.bytes));
    }
    std::sort(taken.begin(), taken.end());
    std::size_t end = 0, best = 0, smallest = std::numeric_limits<std::size_t>::max();
    for (const auto& [from, to] : taken) {
      if (from > end && from - end >= bytes && from - end < smallest) {
        smallest = from - end;
        best = end;
      }
      end = std::max(end, to);
    }
    const std::size_t offset = smallest == std::numeric_limits<std::size_t>::max() ? end : best;
    result.offsets[order[done]] = static_cast<std::int64_t>(offset);
    result.bytes = std::max(result.bytes, offset + bytes);
  }
  return result;
}

// The most bytes that live at once: no packing takes fewer.
std::size_t least_bytes(const std::vector<Lifetime>& pieces) {
  std::size_t least = 0;
  for (const Lifetime& piece : pieces) {
    std::size_t now = 0;
    for (const Lifetime& other : pieces) {
      if (other.first <= piece.first && piece.first <= other.last) now += aligned(other.bytes);
    }
    least = std::max(least, now);
  }
  return least;
}

}  // namespace

Packing pack(const std::vector<Lifetime>& pieces) {
  constexpr std::size_t kMaxTries = 400, kMaxWork = 4'000'000;  // a try takes time in the square of pieces
  Order order(pieces.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return pieces[a].bytes > pieces[b].bytes; });
  Packing best = pack_in(order, pieces), last = best;
  const std::size_t least = least_bytes(pieces);
  const std::size_t tries =
      std::min(kMaxTries, kMaxWork / std::max<std::size_t>(1, pieces.size() * pieces.size()));
  for (std::size_t i = 0; i < tries && best.bytes > least; ++i) {
    // Stable: after the pieces that stuck out, the rest stays sorted.
    std::stable_partition(order.begin(), order.end(), [&](std::size_t piece) {
      return static_cast<std::size_t>(last.offsets[piece]) + aligned(pieces[piece].bytes) == last.bytes;
    });
    last = pack_in(order, pieces);
    if (last.bytes < best.bytes) best = last;
  }
  return best;
}

}  // namespace cohort::script
