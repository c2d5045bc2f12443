// A layer stands before LibTorch's CPU allocator, once in a process. It asks the calling thread's
// MemorySource, or the next layers if there is none. The source of a warm-up is a log: it notes each block
// and when the block dies. The source of a replay is an arena: it hands out planned offsets in the order of
// the warm-up. Always: each block holds its arena by a reference count, so memory outlives the tensors in it.
// A request that differs from the plan ends the plan for this operator, and goes to the allocator.
// Surprising: the layer is never taken away, since blocks that are still in use come back to it.
#include "cohort/script/internal/execute/arena.h"

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <functional>
#include <unordered_map>
#include <utility>

#include "cohort/memory/internal/allocator_layers.h"

namespace cohort::script {
namespace {

// Note [Blocks that are handed on raw]
// Some kernels take their work space by raw_allocate(), which wants a block whose context is its own address,
// and give it back to raw_deleter(), whoever it came from. So blocks that may go that way are known by their
// address: those of a log, and those of an arena that a log saw to be raw. While there are none, nobody
// looks.
class KnownBlocks {
 public:
  using GivenBack = std::function<void(bool is_raw)>;

  static KnownBlocks& get() {
    static KnownBlocks& instance = *new KnownBlocks;  // leaked: blocks outlive statics
    return instance;
  }
  void add(const void* data, bool is_ours, GivenBack given_back) {
    const std::lock_guard lock(mutex_);
    blocks_.insert_or_assign(data, KnownBlock{is_ours, std::move(given_back)});
    count_.store(blocks_.size(), std::memory_order_relaxed);
  }
  // True if the memory is ours, and no allocator is to have it back.
  bool give_back(const void* data, bool is_raw) {
    // Relaxed is enough: who gives a block back got its address after add() had counted it.
    if (count_.load(std::memory_order_relaxed) == 0) return false;
    KnownBlock block;
    {
      const std::lock_guard lock(mutex_);
      const auto found = blocks_.find(data);
      if (found == blocks_.end()) return false;
      block = std::move(found->second);
      blocks_.erase(found);
      count_.store(blocks_.size(), std::memory_order_relaxed);
    }
    // Outside of the lock: it may free an arena, and the arena's own memory comes back through here.
    block.given_back(is_raw);
    return block.is_ours;
  }

 private:
  struct KnownBlock {
    bool is_ours = false;
    GivenBack given_back;
  };
  std::mutex mutex_;
  std::unordered_map<const void*, KnownBlock> blocks_;
  std::atomic<std::size_t> count_{0};
};

thread_local MemorySource* current_source = nullptr;

class ArenaLayer final : public memory::AllocatorLayer {
 public:
  static void install() {
    static ArenaLayer& instance = *new ArenaLayer;  // leaked: blocks outlive statics
    static_cast<void>(instance);
  }

  c10::DataPtr allocate(std::size_t bytes, memory::LayeredAllocator& next) override {
    return current_source == nullptr ? next.allocate(bytes) : current_source->allocate(bytes, next);
  }
  bool take_back(void* data) override { return KnownBlocks::get().give_back(data, /*is_raw=*/true); }
  // For a known block that its holder lets go.
  static void free_known(void* data) {
    if (KnownBlocks::get().give_back(data, /*is_raw=*/false)) return;
    memory::LayeredAllocator::after(kPlace).free(data);
  }

 private:
  static constexpr auto kPlace = memory::LayeredAllocator::Place::kArena;

  ArenaLayer() { memory::LayeredAllocator::add(kPlace, *this); }
};

void release_arena(void* arena) {
  c10::raw::intrusive_ptr::decref(static_cast<Arena*>(arena));
}

}  // namespace

// Behind a head, so that no raw block has the address that the arena itself is known by to allocators.
Arena::Arena(std::size_t bytes) : bytes_(bytes) {
  constexpr std::size_t kHead = 64;
  c10::DataPtr memory = c10::GetCPUAllocator()->allocate(kHead + bytes);
  char* const begin = static_cast<char*>(memory.mutable_get());
  const c10::DeleterFnPtr deleter = memory.get_deleter();
  memory_ = {begin + kHead, memory.release_context(), deleter, c10::Device(c10::kCPU)};
}

c10::DataPtr Arena::block(std::int64_t offset) {
  c10::raw::intrusive_ptr::incref(this);
  return {static_cast<char*>(memory_.mutable_get()) + offset, this, &release_arena, c10::Device(c10::kCPU)};
}

c10::DataPtr Arena::raw_block(std::int64_t offset) {
  void* const data = static_cast<char*>(memory_.mutable_get()) + offset;
  c10::raw::intrusive_ptr::incref(this);
  KnownBlocks::get().add(data, /*is_ours=*/true, [this](bool /*is_raw*/) { release_arena(this); });
  return {data, data, &ArenaLayer::free_known, c10::Device(c10::kCPU)};
}

MemoryScope::MemoryScope(MemorySource* source) : before_(current_source) {
  ArenaLayer::install();
  current_source = source;
}

MemoryScope::~MemoryScope() {
  current_source = before_;
}

c10::DataPtr ArenaSource::allocate(std::size_t bytes, memory::LayeredAllocator& allocator) {
  if (blocks_.empty()) return allocator.allocate(bytes);
  const PlannedBlock block = blocks_.front();
  blocks_ = blocks_.subspan(1);
  if (block.offset == kElsewhere) return allocator.allocate(bytes);
  // More owners than planned: a block that was to be gone still lives, and may lie at this offset.
  if (block.bytes != bytes || owners() != owners_ + block.held) {
    blocks_ = {};
    return allocator.allocate(bytes);
  }
  return block.is_raw ? arena_->raw_block(block.offset) : arena_->block(block.offset);
}

struct AllocationLog::Log {
  std::mutex mutex;  // blocks are given back on any thread
  std::size_t step = 0;
  std::size_t clock = 0;
  std::vector<Allocation> entries;
};

AllocationLog::AllocationLog() : log_(std::make_shared<Log>()) {}

std::size_t AllocationLog::begin_step(std::size_t step) {
  const std::lock_guard lock(log_->mutex);
  log_->step = step;
  return ++log_->clock;
}

std::size_t AllocationLog::find(const void* data) const {
  const std::lock_guard lock(log_->mutex);
  // From the back: an earlier block that was freed may have had the same address.
  for (std::size_t i = log_->entries.size(); i-- > 0 && log_->entries[i].step == log_->step;) {
    if (log_->entries[i].data == data && log_->entries[i].died == kNever) return i;
  }
  return kNever;
}

std::vector<AllocationLog::Allocation> AllocationLog::entries() const {
  const std::lock_guard lock(log_->mutex);
  return log_->entries;
}

c10::DataPtr AllocationLog::allocate(std::size_t bytes, memory::LayeredAllocator& allocator) {
  c10::DataPtr block = allocator.allocate(bytes);
  std::size_t number = 0;
  {
    const std::lock_guard lock(log_->mutex);
    number = log_->entries.size();
    log_->entries.push_back({.step = log_->step, .bytes = bytes, .data = block.get(), .born = ++log_->clock});
  }
  if (block.get() != nullptr &&
      block.compare_exchange_deleter(allocator.raw_deleter(), &ArenaLayer::free_known)) {
    KnownBlocks::get().add(block.get(), /*is_ours=*/false, [log = log_, number](bool is_raw) {
      const std::lock_guard lock(log->mutex);
      Allocation& entry = log->entries[number];
      entry.died = ++log->clock;
      entry.is_raw = is_raw;
    });
  }
  return block;
}

}  // namespace cohort::script
