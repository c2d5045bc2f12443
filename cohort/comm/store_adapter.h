#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "cohort/base/key_value_store.h"

namespace cohort::comm {

/// Connections to one store for requests that wait: while it waits, a connection serves no other thread. One
/// is opened when no other is free, and kept. Threads: any.
class StoreConnections {
 public:
  /// `first`: one that there is already; may be null.
  explicit StoreConnections(c10::intrusive_ptr<c10d::Store> store,
                            c10::intrusive_ptr<c10d::Store> first = {});
  /// As c10d::Store::wait(), on a connection that nobody else waits on. Keys stand after `prefix`, where it
  /// is not empty.
  void wait(const std::string& prefix, const std::vector<std::string>& keys,
            std::chrono::milliseconds timeout);
  /// A connection that nobody else has until give_back(). Where that is never called, it stays with whoever
  /// hangs in it.
  c10::intrusive_ptr<c10d::Store> take();
  /// Returns what take() gave, for the next who waits.
  void give_back(c10::intrusive_ptr<c10d::Store> connection);

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<c10d::Store>> free_;
};

/// A store of c10d's as what needs no LibTorch sees it.
class StoreAdapter : public base::KeyValueStore {
 public:
  /// `waits`: another connection to it, for requests that wait; null: one is opened for the first.
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Store> waits = {})
      : StoreAdapter(store, std::make_shared<StoreConnections>(store, std::move(waits)), "") {}
  /// `prefix`: of the keys of `store` where it is seen through `connections`.
  StoreAdapter(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<StoreConnections> connections,
               std::string prefix)
      : store_(std::move(store)), connections_(std::move(connections)), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }
  bool has(const std::string& key) override { return store_->check({key}); }
  std::string get(const std::string& key) override { return store_->get_to_str(key); }
  std::int64_t add(const std::string& key, std::int64_t value) override { return store_->add(key, value); }
  bool has_all(const std::vector<std::string>& keys) override { return store_->check(keys); }
  bool wait(const std::vector<std::string>& keys, base::Deadline deadline) override;
  std::vector<std::string> get_all(const std::vector<std::string>& keys) override;
  void remove(const std::string& key) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<StoreConnections> connections_;
  std::string prefix_;
};

}  // namespace cohort::comm
