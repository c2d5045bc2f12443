#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

namespace cohort::test {

/// A store that all ranks share, as one of them sees it: `hook` is called before each request.
class HookedStore : public c10d::Store {
 public:
  HookedStore(c10::intrusive_ptr<c10d::Store> store, std::function<void()> hook)
      : store_(std::move(store)), hook_(std::move(hook)) {}
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<HookedStore>(store_->clone(), hook_);
  }
  using Store::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override { ask().set(key, value); }
  std::vector<std::uint8_t> get(const std::string& key) override { return ask().get(key); }
  std::int64_t add(const std::string& key, std::int64_t value) override { return ask().add(key, value); }
  bool deleteKey(const std::string& key) override { return ask().deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return ask().check(keys); }
  std::int64_t getNumKeys() override { return ask().getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { ask().wait(keys); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    ask().wait(keys, timeout);
  }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    return ask().multiGet(keys);
  }

 private:
  c10d::Store& ask() {
    hook_();
    return *store_;
  }
  c10::intrusive_ptr<c10d::Store> store_;
  std::function<void()> hook_;
};

}  // namespace cohort::test
