#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "cohort/core/board.h"

namespace cohort::comm {

/// A store of c10d's as what needs no LibTorch sees it.
class StoreBoard : public core::Board {
 public:
  explicit StoreBoard(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }
  bool has(const std::string& key) override { return store_->check({key}); }
  std::string get(const std::string& key) override { return store_->get_to_str(key); }
  std::int64_t add(const std::string& key, std::int64_t value) override { return store_->add(key, value); }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace cohort::comm
