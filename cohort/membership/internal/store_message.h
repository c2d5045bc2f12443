#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cohort/net/message.h"

/// What a client of an agent's key-value store and the store say to each other.
namespace cohort::membership {

/// Numbers of requests are the client's own. kCancel has that of the wait that it ends, and is not answered.
struct StoreRequest {
  enum class Type : std::uint8_t { kSet, kHas, kGet, kAdd, kWait, kRemove, kCancel, kCompareSet, kAppend };
  Type type = Type::kHas;
  std::uint64_t number = 0;
  std::int64_t value = 0;              ///< of kAdd
  std::vector<std::string> keys = {};  ///< all of one generation, or of none
  std::string bytes = {};              ///< of kSet, kCompareSet and kAppend
  std::string expected = {};           ///< of kCompareSet: what the key has; empty: nothing

  bool operator==(const StoreRequest&) const = default;
};

struct StoreReply {
  enum class Status : std::uint8_t {
    kOk,       ///< of kHas and kWait: all keys are there
    kMissing,  ///< one of the keys is not there; of kRemove: it was not
    kStale,    ///< the keys are of a generation G, and there was one of G + 2 or later
    kInvalid,  ///< of kAdd: the key has a value that is no count
  };
  Status status = Status::kOk;
  std::uint64_t number = 0;
  std::int64_t value = 0;                ///< of kAdd: the count
  std::vector<std::string> values = {};  ///< of kGet, in the order of the keys; of kCompareSet: what it has

  bool operator==(const StoreReply&) const = default;
};

net::Message message_of(const StoreRequest& request);
net::Message message_of(const StoreReply& reply);
/// Throws: CommError.
StoreRequest parse_store_request(const net::Message& message);
StoreReply parse_store_reply(const net::Message& message);

}  // namespace cohort::membership
