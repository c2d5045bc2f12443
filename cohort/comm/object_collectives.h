#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cohort/comm/group.h"

/// Objects between the ranks of a group: what JSON can say, and numbers that are not finite. On the way they
/// are CBOR (RFC 8949), which keeps each bit of a number and each byte of a text.
namespace cohort::comm {

/// Returns an object as it travels, also where there is no group.
std::string object_to_bytes(const nlohmann::json& object);
/// Returns the object that `rank` has sent. Throws: CommError for bytes that are no CBOR.
nlohmann::json object_from_bytes(const std::string& bytes, int rank);

/// Returns rank `root`'s object on every rank. Collective. Throws: CommError for bytes that are no CBOR.
nlohmann::json broadcast_object(const Group& group, const nlohmann::json& object, int root = 0,
                                CallOptions options = {});

/// Returns the object of each rank, on every rank. Collective. Throws: as broadcast_object().
std::vector<nlohmann::json> all_gather_object(const Group& group, const nlohmann::json& object,
                                              CallOptions options = {});

/// Runs `make` on rank 0 and returns its object on all ranks. Collective. Throws, when `make` throws: on rank
/// 0 the same, on the others at once UsageError (for what is the user's fault) or PeerError, with its
/// message.
nlohmann::json run_on_rank0_and_broadcast(const Group& group, const std::function<nlohmann::json()>& make,
                                          CallOptions options = {});

}  // namespace cohort::comm
