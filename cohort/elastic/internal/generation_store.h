#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "cohort/comm/group_owner.h"
#include "cohort/membership/net_store.h"

namespace cohort::elastic {

/// The store of a generation, as c10d sees it. Its waits have the store's timeout; c10d's kNoTimeout, 0, is
/// none. All requests end at comm's StoreDeadline of the calling thread, too. Ownership: shares the
/// client, whose close() ends all requests. Threads: any; a request that waits delays no other one. Throws:
/// what `owner` throws, where the generation has ended; TimeoutError; CommError where the store is gone, or
/// the link to it was lost; the next request has another link; RendezvousError where there is none.
class GenerationStore : public c10d::Store {
 public:
  /// Gives the client for a request. Throws: CommError; RendezvousError.
  using Connect = std::function<std::shared_ptr<membership::NetStore>()>;
  /// `prefix`: of all keys, "generation/7/user/".
  GenerationStore(Connect connect, std::shared_ptr<comm::GroupOwner> owner, std::string prefix,
                  std::chrono::milliseconds timeout);

  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  /// Throws: c10::NotImplementedError, as the store is not of this generation alone.
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }

 private:
  template <typename Body>
  auto ask(Body body);
  std::vector<std::string> full_keys(const std::vector<std::string>& keys) const;

  const Connect connect_;
  const std::shared_ptr<comm::GroupOwner> owner_;
  const std::string prefix_;
};

}  // namespace cohort::elastic
