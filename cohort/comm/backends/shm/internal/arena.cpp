// Best fit within the first arena that has room; a part that comes back joins its free neighbours. Where no
// arena has room, a new one is made, as large as all before together, within bounds. Always: an arena stays
// at its address, under its number, as long as the process lives. So a place that a rank has told its peers
// stays true. The books are kept beside the arenas, in memory that no peer sees.
#include "cohort/comm/backends/shm/internal/arena.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/files/shared_memory.h"

namespace cohort::comm::shm {
namespace {

constexpr std::size_t kAlignment = 64;
// The first arena, and as much again with each, so that a small model's ranks take little.
constexpr std::size_t kFirstBytes = std::size_t{4} << 20, kMaxBytes = std::size_t{64} << 20;

struct Arena {
  base::SharedMemory memory;
  std::map<std::size_t, std::size_t> free;  // offset -> bytes
  std::map<std::size_t, std::size_t> used;

  // The smallest part that is large enough.
  std::optional<std::size_t> take(std::size_t bytes) {
    auto best = free.end();
    for (auto part = free.begin(); part != free.end(); ++part) {
      if (part->second >= bytes && (best == free.end() || part->second < best->second)) best = part;
    }
    if (best == free.end()) return std::nullopt;
    const auto [offset, whole] = *best;
    free.erase(best);
    if (whole > bytes) free.emplace(offset + bytes, whole - bytes);
    used.emplace(offset, bytes);
    return offset;
  }

  void give(std::size_t offset) {
    const auto part = used.find(offset);
    auto [here, inserted] = free.emplace(offset, part->second);
    used.erase(part);
    const auto after = std::next(here);
    if (after != free.end() && here->first + here->second == after->first) {
      here->second += after->second;
      free.erase(after);
    }
    if (here == free.begin()) return;
    const auto before = std::prev(here);
    if (before->first + before->second == here->first) {
      before->second += here->second;
      free.erase(here);
    }
  }

  bool holds(const std::byte* data) const {
    return data >= memory.data() && data < memory.data() + memory.size();
  }
};

struct Arenas {
  std::mutex mutex;
  std::vector<Arena> list;
};

// It is leaked on purpose: tensors may go after statics do.
Arenas& arenas() {
  static Arenas* all = new Arenas;
  return *all;
}

// Most processes have none, and then no call looks.
std::atomic<bool> any{false};

}  // namespace

void* arena_allocate(std::size_t bytes) {
  bytes = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  Arenas& all = arenas();
  const std::lock_guard lock(all.mutex);
  for (Arena& arena : all.list) {
    if (const auto offset = arena.take(bytes)) return arena.memory.data() + *offset;
  }
  std::size_t total = 0;
  for (const Arena& arena : all.list) total += arena.memory.size();
  Arena& arena = all.list.emplace_back();
  try {
    arena.memory = base::SharedMemory::create(
        "comm.shm", std::max(bytes, std::clamp(total, kFirstBytes, kMaxBytes)), true);
  } catch (...) {
    all.list.pop_back();
    throw;
  }
  arena.free.emplace(0, arena.memory.size());
  any.store(true);
  return arena.memory.data() + *arena.take(bytes);
}

void arena_free(void* data) {
  Arenas& all = arenas();
  const std::lock_guard lock(all.mutex);
  for (Arena& arena : all.list) {
    if (!arena.holds(static_cast<std::byte*>(data))) continue;
    arena.give(static_cast<std::size_t>(static_cast<std::byte*>(data) - arena.memory.data()));
    return;
  }
}

std::optional<ArenaPlace> arena_find(const void* data, std::size_t bytes) {
  if (!any.load(std::memory_order_acquire)) return std::nullopt;
  const auto* begin = static_cast<const std::byte*>(data);
  Arenas& all = arenas();
  const std::lock_guard lock(all.mutex);
  for (std::size_t i = 0; i < all.list.size(); ++i) {
    const Arena& arena = all.list[i];
    if (!arena.holds(begin)) continue;
    const auto offset = static_cast<std::size_t>(begin - arena.memory.data());
    if (offset + bytes > arena.memory.size()) return std::nullopt;
    return ArenaPlace{i + 1, offset};
  }
  return std::nullopt;
}

int arena_fd(std::uint64_t arena) {
  Arenas& all = arenas();
  const std::lock_guard lock(all.mutex);
  return all.list.at(arena - 1).memory.fd();
}

}  // namespace cohort::comm::shm
