#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "cohort/base/secret.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/membership/net_store.h"

namespace cohort::elastic {

/// A client of a generation's store, which is mostly that of the generation before. Where its link is lost
/// the next request has another one. Threads: any.
class StoreClient {
 public:
  /// `timeout`: of the connection and of each request. `silence`: link_silence_of_process() (connections.h).
  StoreClient(std::chrono::milliseconds timeout, std::chrono::milliseconds silence)
      : timeout_(timeout), silence_(silence), secret_(base::Secret::of_process()) {}

  /// Returns a client of the store at `address`. Blocks until it is connected, up to the timeout or
  /// `deadline`. Throws: RendezvousError; CommError after close().
  std::shared_ptr<membership::NetStore> at(const std::string& address,
                                           base::Deadline deadline = base::Deadline::never());
  /// Ends all requests.
  void close();

 private:
  std::shared_ptr<membership::NetStore> find(const std::string& address) const;

  const std::chrono::milliseconds timeout_, silence_;
  const std::optional<base::Secret> secret_;
  std::mutex mutex_;  // of all below
  bool is_closed_ = false;
  std::string address_;
  std::shared_ptr<membership::NetStore> store_;
};

}  // namespace cohort::elastic
