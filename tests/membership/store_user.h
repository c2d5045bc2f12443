#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cohort/base/threads/wait.h"
#include "cohort/membership/etcd_store.h"
#include "tests/support/patience.h"
#include "tests/support/processes/log_lines.h"

namespace cohort::test {

/// A store, and what it has told.
class StoreUser {
 public:
  using Type = membership::StoreAnswer::Type;

  explicit StoreUser(membership::EtcdOptions options)
      : store_(membership::make_etcd_store(std::move(options))) {
    store_->watch([this](const membership::StoreAnswer& answer) {
      const std::lock_guard lock(mutex_);
      answers_.push_back(answer);
      changed_.notify_all();
    });
  }
  ~StoreUser() { store_.reset(); }

  /// The answer to a compare-and-swap, which kRecord may come before.
  membership::StoreAnswer swap(std::uint64_t expected, std::string text) {
    const std::size_t begin = num_answers();
    store_->compare_and_swap(expected, std::move(text));
    return wait_for(begin,
                    [](const membership::StoreAnswer& answer) { return answer.type != Type::kRecord; });
  }
  void ask() { store_->read(); }
  membership::StoreAnswer read() {
    const std::size_t begin = num_answers();
    store_->read();
    return wait_for(begin,
                    [](const membership::StoreAnswer& answer) { return answer.type == Type::kRecord; });
  }
  /// The first kRecord that has this text, of all that were told.
  membership::StoreAnswer wait_for_record(const std::string& text) {
    return wait_for(0, [&](const membership::StoreAnswer& answer) {
      return answer.type == Type::kRecord && answer.text == text;
    });
  }
  template <typename Condition>
  membership::StoreAnswer wait_for(std::size_t begin, const Condition& condition) {
    std::unique_lock lock(mutex_);
    const membership::StoreAnswer* found = nullptr;
    const auto is_there = [&] {
      for (std::size_t i = begin; i < answers_.size(); ++i) {
        if (condition(answers_[i])) found = &answers_[i];
        if (found != nullptr) return true;
      }
      return false;
    };
    if (!base::wait(changed_, lock, is_there, patience()))
      throw TimeoutError("test", "the store has not answered");
    return *found;
  }
  std::size_t num_answers() const {
    const std::lock_guard lock(mutex_);
    return answers_.size();
  }
  std::vector<membership::StoreAnswer> answers() const {
    const std::lock_guard lock(mutex_);
    return {answers_.begin(), answers_.end()};
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<membership::StoreAnswer> answers_;
  std::shared_ptr<membership::RecordStore> store_;
};

}  // namespace cohort::test
