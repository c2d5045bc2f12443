#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

/// What a rank called, in a few words and at a fixed size: to compare ranks, and to say it later. Internal.
namespace cohort::comm {

/// What belongs to one call. Where ranks differ by design (the root's list of parts) it is left out.
struct CallDetails {
  std::span<const at::Tensor> tensors;  ///< of the same shapes on all ranks, from dimension `from_dim` on
  int from_dim = 0;
  const char* op = nullptr;                               ///< a literal, as op_name returns it
  const char* direction = nullptr;                        ///< "from" or "to" `peer`
  int peer = -1;                                          ///< root, or the other end of a message
  std::vector<std::int64_t> in_rows = {}, out_rows = {};  ///< of all_to_all, to and from each rank
};

struct Signature {
  struct Shape {
    at::ScalarType dtype = at::kFloat;
    std::int8_t dim = 0;
    std::array<std::int64_t, 5> sizes{};
  };

  const char* call = "";  ///< a literal
  std::int64_t number = 0;
  const char* op = nullptr;
  const char* direction = nullptr;
  int peer = -1;
  int num_tensors = 0;
  std::array<Shape, 2> shapes{};

  Signature() = default;
  Signature(const char* name, const CallDetails& details);
  /// "float[3, 4]", shortened where it is long.
  std::string shape_text() const;
  /// "all_reduce 17 float[3, 4] SUM".
  std::string text() const;
};

/// "float[3, 4]".
std::string shape_text(const at::Tensor& tensor);

/// "SUM"; a literal.
const char* op_name(const c10d::ReduceOp& op);

}  // namespace cohort::comm
