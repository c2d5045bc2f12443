#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/key_value_store.h"
#include "cohort/base/secret.h"
#include "cohort/net/tls_options.h"

/// A key-value store of an agent, for its generation's ranks. No LibTorch.
///
///     membership::NetStoreServer server({.secret = secret->for_ranks()});   // at server.address()
///
///     membership::NetStore store({.address = generation.store, .secret = base::Secret::of_process()});
///     store.set("generation/7/address/0", address);
///     if (!store.wait({"generation/7/address/1"}, base::Deadline(30s))) ...
namespace cohort::membership {

namespace net_store_detail {
class Server;
class Client;
}  // namespace net_store_detail

/// A key is of a generation G, and the store has seen one of G + 2 or later.
class StaleGeneration : public CommError {
 public:
  using CommError::CommError;
};

/// A key is not there.
class MissingKey : public CommError {
 public:
  using CommError::CommError;
};

/// Where a store listens, and who may use it.
struct NetStoreServerOptions {
  std::string listen = "127.0.0.1:0";       ///< as net::Node::listen() takes it, and the next
  std::string host = {};                    ///< by which others reach this one
  std::optional<base::Secret> secret = {};  ///< that ranks have (base::Secret::for_ranks())
  std::optional<net::TlsOptions> tls = {};
  /// After so long without a sign of life a client is given up: 500 ms or more, and the next.
  std::chrono::milliseconds silence{2'000};
};

/// Keeps what ranks leave. Keys "generation/G/..." belong to generation G. The first one of G + 1 ends all
/// before G: their keys are dropped. Threads: any; net's does the work.
class NetStoreServer {
 public:
  /// Throws: as net::Node::listen().
  explicit NetStoreServer(NetStoreServerOptions options);
  ~NetStoreServer();
  NetStoreServer(const NetStoreServer&) = delete;
  NetStoreServer& operator=(const NetStoreServer&) = delete;

  /// Where clients reach it.
  const std::string& address() const;
  std::size_t num_keys() const;

 private:
  std::shared_ptr<net_store_detail::Server> server_;
};

/// Which store, and how long a request may take.
struct NetStoreOptions {
  std::string address;  ///< NetStoreServer::address()
  std::optional<base::Secret> secret = {};
  std::optional<net::TlsOptions> tls = {};
  std::chrono::milliseconds timeout{30'000};          ///< of the connection and of each request but wait()
  base::Deadline deadline = base::Deadline::never();  ///< of the connection too
  /// After so long without a sign of life the store is given up.
  std::chrono::milliseconds silence{2'000};
};

/// A client of the store. A call is one request, also for several keys. The server answers wait() when all
/// keys are there: nobody asks again and again. Threads: any. Throws: StaleGeneration; TimeoutError after
/// NetStoreOptions::timeout; CommError where the store is gone, or after close().
class NetStore : public base::KeyValueStore {
 public:
  /// Blocks until it is connected. Throws: RendezvousError.
  explicit NetStore(NetStoreOptions options);
  ~NetStore() override;
  NetStore(const NetStore&) = delete;
  NetStore& operator=(const NetStore&) = delete;

  void set(const std::string& key, const std::string& value) override;
  bool has(const std::string& key) override;
  /// Throws: MissingKey where it is not there.
  std::string get(const std::string& key) override;
  /// Throws: UsageError where the key has a value that is no count, or gets too large.
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool has_all(const std::vector<std::string>& keys) override;
  /// Blocks until the keys are there or the deadline passes.
  bool wait(const std::vector<std::string>& keys, base::Deadline deadline) override;
  /// As get().
  std::vector<std::string> get_all(const std::vector<std::string>& keys) override;
  void remove(const std::string& key) override { erase(key); }

  /// The key's value gets these bytes at its end; a key that is not there gets them as its value. Of several
  /// at the same time none is lost.
  void append(const std::string& key, const std::string& bytes);
  /// The same over the same connection, which close() ends for both. A request ends at `deadline` too, as
  /// after the timeout.
  NetStore until(base::Deadline deadline) const;
  /// As remove(); returns whether the key was there.
  bool erase(const std::string& key);
  /// Sets the key to `value` where it has `expected`; empty: also where it is not there. Returns what it has
  /// then; `expected` where it is not there.
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& value);

  /// The store is gone.
  bool is_down() const;
  /// Ends all calls, also those that wait.
  void close();

 private:
  NetStore(std::shared_ptr<net_store_detail::Client> client, base::Deadline deadline);

  std::shared_ptr<net_store_detail::Client> client_;
  base::Deadline deadline_ = base::Deadline::never();
};

}  // namespace cohort::membership
