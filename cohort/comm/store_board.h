#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "cohort/core/board.h"

namespace cohort::comm {

/// A store of c10d's as what needs no LibTorch sees it.
class StoreBoard : public core::Board {
 public:
  /// `waits`: another connection to it, since while a request waits a connection serves no other thread;
  /// null: one is opened for the first wait.
  explicit StoreBoard(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Store> waits = {})
      : store_(std::move(store)), waits_(std::move(waits)) {}
  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }
  bool has(const std::string& key) override { return store_->check({key}); }
  std::string get(const std::string& key) override { return store_->get_to_str(key); }
  std::int64_t add(const std::string& key, std::int64_t value) override { return store_->add(key, value); }
  bool has_all(const std::vector<std::string>& keys) override { return store_->check(keys); }
  bool wait(const std::vector<std::string>& keys, core::Deadline deadline) override;
  std::vector<std::string> get_all(const std::vector<std::string>& keys) override;
  void remove(const std::string& key) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_, waits_;
};

/// Whether an error's words say that a time was over.
bool says_timeout(const std::string& words);

}  // namespace cohort::comm
