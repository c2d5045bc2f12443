#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "cohort/base/key_value_store.h"

namespace cohort::test {

/// The store of a job in one process, with faults.
class MapStore : public base::KeyValueStore {
 public:
  void set(const std::string& key, const std::string& value) override {
    const auto lock = enter();
    words_[key] = value;
  }
  bool has(const std::string& key) override {
    const auto lock = enter();
    return words_.count(key) > 0;
  }
  std::string get(const std::string& key) override {
    const auto lock = enter();
    return words_.at(key);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    const auto lock = enter();
    return counts_[key] += value;
  }
  void remove(const std::string& key) override {
    const auto lock = enter();
    words_.erase(key);
    counts_.erase(key);
  }

  /// Calls so far.
  std::int64_t num_requests() const { return num_requests_; }

  std::size_t num_keys() {
    const auto lock = enter();
    return words_.size() + counts_.size();
  }

  /// Every later call throws.
  void break_it(const std::string& why) {
    const std::lock_guard lock(mutex_);
    broken_ = why;
  }
  /// Every later call waits until what this returns goes.
  std::shared_ptr<void> hang() {
    const std::lock_guard lock(mutex_);
    hangs_ = true;
    return {nullptr, [this](void*) {
              const std::lock_guard again(mutex_);
              hangs_ = false;
              released_.notify_all();
            }};
  }

 private:
  std::unique_lock<std::mutex> enter() {
    ++num_requests_;
    std::unique_lock lock(mutex_);
    released_.wait(lock, [this] { return !hangs_; });
    if (!broken_.empty()) throw std::runtime_error(broken_);
    return lock;
  }

  std::mutex mutex_;
  std::condition_variable released_;
  std::atomic<std::int64_t> num_requests_{0};
  bool hangs_ = false;
  std::string broken_;
  std::map<std::string, std::string> words_;
  std::map<std::string, std::int64_t> counts_;
};

}  // namespace cohort::test
