#include "cohort/script/arena.h"

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <unordered_map>
#include <utility>

namespace cohort::script {
namespace {

thread_local MemorySource* current_source = nullptr;

// Stands before the allocator that was there, and stays: an allocator must live for ever.
class FrontAllocator final : public c10::Allocator {
 public:
  static void install() {
    static FrontAllocator& instance = *new FrontAllocator;  // leaked: blocks outlive statics
    static_cast<void>(instance);
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    return current_source == nullptr ? behind_->allocate(bytes) : current_source->allocate(bytes, *behind_);
  }
  c10::DeleterFnPtr raw_deleter() const override { return behind_->raw_deleter(); }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    behind_->copy_data(dest, src, count);
  }

 private:
  FrontAllocator() : behind_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, /*priority=*/255); }
  c10::Allocator* behind_;
};

void let_go(void* arena) {
  c10::raw::intrusive_ptr::decref(static_cast<Arena*>(arena));
}

}  // namespace

Arena::Arena(std::size_t bytes) : bytes_(bytes), memory_(c10::GetCPUAllocator()->allocate(bytes)) {}

c10::DataPtr Arena::block(std::int64_t offset) {
  c10::raw::intrusive_ptr::incref(this);
  return {static_cast<char*>(memory_.mutable_get()) + offset, this, &let_go, c10::Device(c10::kCPU)};
}

MemoryScope::MemoryScope(MemorySource* source) : before_(current_source) {
  FrontAllocator::install();
  current_source = source;
}

MemoryScope::~MemoryScope() {
  current_source = before_;
}

c10::DataPtr ArenaSource::allocate(std::size_t bytes, c10::Allocator& allocator) {
  if (blocks_.empty()) return allocator.allocate(bytes);
  const Block block = blocks_.front();
  blocks_ = blocks_.subspan(1);
  if (block.offset == kElsewhere || block.bytes != bytes) return allocator.allocate(bytes);
  return arena_->block(block.offset);
}

struct AllocationLog::Log {
  std::mutex mutex;  // blocks are given back on any thread
  std::size_t step = 0;
  std::vector<Entry> entries;
};

// Note [Blocks that are handed on raw]
// Some kernels take their work space by raw_allocate(), which wants a block whose context is its address, and
// give it back to the deleter of the allocator. So a block that is logged keeps its context, and who it
// belongs to is found by its address; one that went raw seems never to be given back, and is left alone.
struct AllocationLog::Tracked {
  std::mutex mutex;
  std::unordered_map<const void*, std::pair<std::shared_ptr<Log>, std::size_t>> blocks;
  std::atomic<c10::DeleterFnPtr> free{nullptr};

  static Tracked& get() {
    static Tracked& instance = *new Tracked;  // leaked: blocks outlive statics
    return instance;
  }
  static void give_back(void* data) {
    Tracked& self = get();
    {
      const std::lock_guard lock(self.mutex);
      const auto found = self.blocks.find(data);
      if (found != self.blocks.end()) {
        const auto [log, number] = std::move(found->second);
        self.blocks.erase(found);
        const std::lock_guard log_lock(log->mutex);
        log->entries[number].freed = log->step;
      }
    }
    self.free.load()(data);
  }
};

AllocationLog::AllocationLog() : log_(std::make_shared<Log>()) {}

AllocationLog::~AllocationLog() {
  Tracked& tracked = Tracked::get();
  const std::lock_guard lock(tracked.mutex);
  std::erase_if(tracked.blocks, [&](const auto& block) { return block.second.first == log_; });
}

void AllocationLog::begin_step(std::size_t step) {
  const std::lock_guard lock(log_->mutex);
  log_->step = step;
}

std::size_t AllocationLog::find(const void* data) const {
  const std::lock_guard lock(log_->mutex);
  for (std::size_t i = log_->entries.size(); i-- > 0 && log_->entries[i].step == log_->step;) {
    if (log_->entries[i].data == data && log_->entries[i].freed == kNever) return i;
  }
  return kNever;
}

std::vector<AllocationLog::Entry> AllocationLog::entries() const {
  const std::lock_guard lock(log_->mutex);
  return log_->entries;
}

c10::DataPtr AllocationLog::allocate(std::size_t bytes, c10::Allocator& allocator) {
  c10::DataPtr block = allocator.allocate(bytes);
  Tracked& tracked = Tracked::get();
  tracked.free.store(allocator.raw_deleter());
  std::size_t number = 0;
  {
    const std::lock_guard lock(log_->mutex);
    number = log_->entries.size();
    log_->entries.push_back({.step = log_->step, .bytes = bytes, .data = block.get()});
  }
  if (block.get() != nullptr &&
      block.compare_exchange_deleter(allocator.raw_deleter(), &Tracked::give_back)) {
    const std::lock_guard lock(tracked.mutex);
    tracked.blocks.insert_or_assign(block.get(), std::pair(log_, number));
  }
  return block;
}

}  // namespace cohort::script
