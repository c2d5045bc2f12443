#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

/// LibTorch's store that one process serves at a port: the rendezvous of a job's ranks.
namespace cohort::comm {

/// Where a store is, and which side of it this process is.
struct TcpStoreOptions {
  std::string host;        ///< name or address of the process that serves
  std::uint16_t port = 0;  ///< 0, for one that serves: the system chooses
  bool serves = false;     ///< keeps the store, in a thread of this process
  bool is_local = false;   ///< one that serves listens on 127.0.0.1 only, or ::1 where `host` is of IPv6
  std::chrono::milliseconds timeout = std::chrono::seconds(30);  ///< also of what is asked of it later
  std::function<bool()> interrupted = nullptr;                   ///< asked while waiting
};

/// Returns the store once it answers; null when `interrupted` says so. Blocking: two seconds longer than the
/// timeout at most. Throws: TimeoutError when something listens there that does not answer; what LibTorch
/// throws when nobody listens at the deadline, or the port is taken.
c10::intrusive_ptr<c10d::TCPStore> open_tcp_store(const TcpStoreOptions& options);

}  // namespace cohort::comm
