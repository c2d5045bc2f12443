#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

/// Memory of this process that other ranks can map: what tensors that are to be reduced should be born in.
namespace cohort::comm::shm {

/// Returns `bytes` bytes, aligned to 64. They come from large blocks that are kept for later when they are
/// given back. Threads: any. Throws: SystemError when there is no memory.
void* arena_allocate(std::size_t bytes);
void arena_free(void* data);

/// Part of an arena. Numbers of arenas begin at 1.
struct ArenaPlace {
  std::uint64_t arena = 0;
  std::size_t offset = 0;
};
/// Where [data, data + bytes) lies; nothing when it is not of an arena. Threads: any.
std::optional<ArenaPlace> arena_find(const void* data, std::size_t bytes);
/// The descriptor of an arena: open as long as the process lives.
int arena_fd(std::uint64_t arena);

}  // namespace cohort::comm::shm
