#include "cohort/comm/backends/shm/internal/signature.h"

#include <array>

#include "cohort/base/error.h"

namespace cohort::comm::shm {
namespace {

// From the lowest bit on.
constexpr int kTypeBits = 4, kDtypeBits = 4, kOpBits = 4, kRootBits = 6;
static_assert(kDtypes <= 1 << kDtypeBits && kOps < 1 << kOpBits);

}  // namespace

std::uint64_t Signature::pack() const {
  std::uint64_t word = bytes;
  word = word << kRootBits | static_cast<std::uint64_t>(root);
  word = word << kOpBits | static_cast<std::uint64_t>(op);
  word = word << kDtypeBits | static_cast<std::uint64_t>(dtype);
  return word << kTypeBits | static_cast<std::uint64_t>(type);
}

Signature Signature::unpack(std::uint64_t word) {
  const auto take = [&word](int bits) {
    const std::uint64_t field = word & ((std::uint64_t{1} << bits) - 1);
    word >>= bits;
    return field;
  };
  Signature signature;
  signature.type = static_cast<CollectiveType>(take(kTypeBits));
  signature.dtype = static_cast<Dtype>(take(kDtypeBits));
  signature.op = static_cast<Op>(take(kOpBits));
  signature.root = static_cast<int>(take(kRootBits));
  signature.bytes = word;
  return signature;
}

std::string Signature::text() const {
  constexpr std::array<const char*, 10> names = {"rendezvous", "all_reduce",     "broadcast",  "reduce",
                                                 "all_gather", "reduce_scatter", "all_to_all", "gather",
                                                 "scatter",    "barrier"};
  std::string text = names[static_cast<std::size_t>(type)];
  if (type == CollectiveType::kBarrier || type == CollectiveType::kRendezvous) return text;
  if (type != CollectiveType::kAllToAll) text += base::concat(" of ", bytes, " bytes");
  if (dtype != Dtype::kBytes) text += base::concat(" ", name_of(dtype));
  if (op != Op::kNone) text += base::concat(" ", name_of(op));
  if (type == CollectiveType::kBroadcast || type == CollectiveType::kScatter)
    text += base::concat(" from ", root);
  if (type == CollectiveType::kReduce || type == CollectiveType::kGather) text += base::concat(" to ", root);
  return text;
}

}  // namespace cohort::comm::shm
