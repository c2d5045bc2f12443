#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cohort/comm/group.h"

/// Texts and single numbers between the ranks of a group, and what they must agree on. The timeout of a call
/// is that of all it consists of.
namespace cohort::comm {

/// Returns rank `root`'s text on every rank. Collective.
std::string broadcast_text(const Group& group, const std::string& text, int root = 0,
                           CallOptions options = {});

/// Returns the number of each rank, on every rank. Collective.
std::vector<std::int64_t> all_gather_number(const Group& group, std::int64_t number,
                                            CallOptions options = {});

/// Returns the text of each rank, on every rank. Collective.
std::vector<std::string> all_gather_text(const Group& group, const std::string& text,
                                         CallOptions options = {});

/// Returns on all ranks if `text` is the same everywhere, and throws on all if it is not. Collective.
/// `what` begins the message, such as "the model". Throws: UsageError naming the first rank that differs from
/// rank 0, and the first line in which it does.
void require_same(const Group& group, const std::string& what, const std::string& text,
                  CallOptions options = {});

}  // namespace cohort::comm
