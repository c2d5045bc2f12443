// Objects travel as texts of bytes, so the collectives and their errors are those of texts. What rank 0 does
// for all ends on all ranks: its result travels with how it went, so a failure of rank 0 is a failure of the
// rest at once.
#include "cohort/comm/object_collectives.h"

#include <exception>
#include <nlohmann/json.hpp>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/comm/text_collectives.h"

namespace cohort::comm {

using nlohmann::json;

std::string object_to_bytes(const json& object) {
  std::string bytes;
  json::to_cbor(object, bytes);
  return bytes;
}

json object_from_bytes(const std::string& bytes, int rank) {
  json object = json::from_cbor(bytes, true, false);
  if (object.is_discarded()) {
    throw CommError("comm.object", base::concat("what rank ", rank, " sent is no object (", bytes.size(),
                                                " bytes that are no CBOR)"));
  }
  return object;
}

json broadcast_object(const Group& group, const json& object, int root, CallOptions options) {
  if (group.size() == 1) return object;
  const std::string bytes = group.rank() == root ? object_to_bytes(object) : std::string();
  return object_from_bytes(broadcast_text(group, bytes, root, options), root);
}

std::vector<json> all_gather_object(const Group& group, const json& object, CallOptions options) {
  if (group.size() == 1) return {object};
  std::vector<json> objects;
  for (const std::string& bytes : all_gather_text(group, object_to_bytes(object), options)) {
    objects.push_back(object_from_bytes(bytes, static_cast<int>(objects.size())));
  }
  return objects;
}

json run_on_rank0_and_broadcast(const Group& group, const std::function<json()>& make, CallOptions options) {
  if (group.size() == 1) return make();
  json outcome;
  std::exception_ptr error;
  if (group.rank() == 0) {
    try {
      outcome = {{"value", make()}};
    } catch (const std::exception& failure) {
      outcome = {{"error", base::message_of(failure)}, {"is_users_fault", base::is_users_fault(failure)}};
      error = std::current_exception();
    }
  }
  outcome = broadcast_object(group, outcome, 0, options);
  // Rank 0 throws what it caught; the others have its text alone.
  if (error) std::rethrow_exception(error);
  if (const auto found = outcome.find("error"); found != outcome.end()) {
    const std::string what = "rank 0 failed: " + found->get<std::string>();
    if (outcome.value("is_users_fault", false)) throw UsageError("comm.rank0", what);
    throw PeerError("comm.rank0", what);
  }
  return outcome.at("value");
}

}  // namespace cohort::comm
