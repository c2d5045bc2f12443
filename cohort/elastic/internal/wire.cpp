#include "cohort/elastic/internal/wire.h"

#include <cstring>

#include "cohort/base/error.h"

namespace cohort::elastic {
namespace {

constexpr std::uint32_t kWireVersion = 1;

// Without holes, so that no byte of it is undefined.
struct FixedPart {
  std::uint32_t version, type, from, work_us;
  std::uint64_t generation, number, value, hash;
};
static_assert(sizeof(FixedPart) == 48);

}  // namespace

std::string encode(const Wire& wire) {
  const FixedPart fixed{kWireVersion,    static_cast<std::uint32_t>(wire.type),
                        wire.from,       wire.work_us,
                        wire.generation, wire.number,
                        wire.value,      wire.hash};
  std::string header(sizeof fixed, '\0');
  std::memcpy(header.data(), &fixed, sizeof fixed);
  return header + wire.text;
}

Wire decode(std::string_view header) {
  FixedPart fixed{};
  const bool is_whole = header.size() >= sizeof fixed;
  if (is_whole) std::memcpy(&fixed, header.data(), sizeof fixed);
  if (!is_whole || fixed.version != kWireVersion || fixed.type >= kNumWireTypes) {
    throw CommError("elastic.read",
                    base::concat("a message of another process cannot be read: ", header.size(),
                                 " bytes, version ", fixed.version, ", type ", fixed.type),
                    "the same version of Cohort on all hosts");
  }
  return {static_cast<WireType>(fixed.type),
          fixed.from,
          fixed.work_us,
          fixed.generation,
          fixed.number,
          fixed.value,
          fixed.hash,
          std::string(header.substr(sizeof fixed))};
}

}  // namespace cohort::elastic
