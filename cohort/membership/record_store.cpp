#include "cohort/membership/record_store.h"

namespace cohort::membership {

void MemoryStore::read() {
  StoreAnswer answer;
  {
    const std::lock_guard lock(mutex_);
    answer = {StoreAnswer::Type::kRecord, revision_, text_};
  }
  listener_(answer);
}

void MemoryStore::compare_and_swap(std::uint64_t expected, std::string text) {
  StoreAnswer answer;
  {
    const std::lock_guard lock(mutex_);
    if (revision_ == expected) {
      text_ = std::move(text);
      answer = {StoreAnswer::Type::kSwapped, ++revision_, text_};
    } else {
      answer = {StoreAnswer::Type::kConflict, revision_, text_};
    }
  }
  listener_(answer);
}

}  // namespace cohort::membership
