#include "cohort/elastic/internal/store_client.h"

#include "cohort/base/error.h"
#include "cohort/net/tls_options.h"

namespace cohort::elastic {

// Under the mutex.
std::shared_ptr<membership::NetStore> StoreClient::find(const std::string& address) const {
  if (is_closed_) throw CommError("elastic.store", "the client of the store was closed");
  return store_ != nullptr && address_ == address && !store_->is_down() ? store_ : nullptr;
}

std::shared_ptr<membership::NetStore> StoreClient::at(const std::string& address, base::Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    if (auto store = find(address)) return store;
  }
  auto store =
      std::make_shared<membership::NetStore>(membership::NetStoreOptions{.address = address,
                                                                         .secret = secret_,
                                                                         .tls = net::TlsOptions::of_process(),
                                                                         .timeout = timeout_,
                                                                         .deadline = deadline,
                                                                         .silence = silence_});
  const std::lock_guard lock(mutex_);
  // Another thread may have connected meanwhile. close() is to end the requests of both.
  if (auto other = find(address)) return other;
  address_ = address;
  store_ = store;
  return store;
}

void StoreClient::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  if (store_ != nullptr) store_->close();
}

}  // namespace cohort::elastic
