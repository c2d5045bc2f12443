#pragma once

#include <cstdint>
#include <string>

#include "cohort/net/message.h"
#include "cohort/rpc/encoded.h"

/// Encoded values as messages of module net: tensors become payloads, which are not copied where they lie in one piece on
/// the CPU.
namespace cohort::rpc {

/// Throws: UsageError for a tensor that cannot travel (sparse, quantized, on a meta device).
net::Message to_message(std::uint32_t channel, Encoded encoded);

/// The tensors share the memory that the message was read into. Throws: CommError for what to_message() does not write.
Encoded to_encoded(net::Message& message);

}  // namespace cohort::rpc
