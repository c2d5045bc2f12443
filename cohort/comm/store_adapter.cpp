#include "cohort/comm/store_adapter.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "cohort/comm/internal/error_cause.h"

namespace cohort::comm {

using std::chrono::milliseconds;
using Store = c10::intrusive_ptr<c10d::Store>;

StoreConnections::StoreConnections(Store store, Store first) : store_(std::move(store)) {
  if (first != nullptr) free_.push_back(std::move(first));
}

void StoreConnections::wait(const std::string& prefix, const std::vector<std::string>& keys,
                            milliseconds timeout) {
  const Store connection = take();
  try {
    Store store = connection;
    if (!prefix.empty()) store = c10::make_intrusive<c10d::PrefixStore>(prefix, connection);
    store->wait(keys, timeout);
  } catch (...) {
    give_back(connection);  // that its store is silent, or gone, the next who waits is told at once
    throw;
  }
  give_back(connection);
}

Store StoreConnections::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      Store connection = std::move(free_.back());
      free_.pop_back();
      return connection;
    }
  }
  // Without the lock: a clone connects, and that may take its time.
  return store_->clone();
}

void StoreConnections::give_back(Store connection) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(connection));
}

bool StoreAdapter::wait(const std::vector<std::string>& keys, base::Deadline deadline) {
  try {
    connections_->wait(prefix_, keys, milliseconds(std::max(1, deadline.remaining_ms())));
    return true;
  } catch (const std::exception& error) {
    // A timeout before the deadline is the store's silence, and not an answer.
    if (cause_of(error) == ErrorCause::kTimeout && deadline.expired()) return false;
    throw;
  }
}

std::vector<std::string> StoreAdapter::get_all(const std::vector<std::string>& keys) {
  if (keys.empty() || !store_->hasExtendedApi()) return KeyValueStore::get_all(keys);
  std::vector<std::string> values;
  for (const std::vector<std::uint8_t>& bytes : store_->multiGet(keys)) {
    values.emplace_back(bytes.begin(), bytes.end());
  }
  return values;
}

// A store that a file keeps does not forget.
void StoreAdapter::remove(const std::string& key) {
  try {
    store_->deleteKey(key);
  } catch (const c10::NotImplementedError&) {
  }
}

}  // namespace cohort::comm
