#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "cohort/parallel/virtual_ranks/slice_exchange.h"

namespace cohort::parallel {

/// A text of each process on its way to all processes of an exchange. Lengths travel first, so that other
/// transfers may run while they do. The processes of an elastic run have no comm::Group; over one, see
/// comm/text_collectives.h.
/// Collective: each call but the destructor. Threads: one caller at a time.
class TextGather {
 public:
  /// Begins to send the length of `text`. `exchange`: null for one process alone; it must outlive this.
  TextGather(SliceExchange* exchange, std::string text);
  /// Begins to send the text. Blocking: until the lengths of all texts are here.
  void send_text();
  /// Returns the texts of all processes, in their order. Blocking. Throws: what the transport throws.
  std::vector<std::string> receive();

 private:
  SliceExchange* const exchange_;  // null: one process
  const std::string text_;
  at::Tensor length_, lengths_, padded_, all_;
  SliceExchange::Transfer arrived_;
};

/// Returns the texts of all processes, in their order. `exchange`: null for one process alone. Collective.
std::vector<std::string> all_gather_texts(SliceExchange* exchange, const std::string& text);

}  // namespace cohort::parallel
