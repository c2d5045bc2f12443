// Counts every allocation of the process; LibTorch's tensors are allocated with these operators too. A file
// of its own, so that the compiler does not inline half of the pair.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace cohort::test {
std::atomic<std::int64_t> allocations{0};
}

void* operator new(std::size_t size) {
  cohort::test::allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
