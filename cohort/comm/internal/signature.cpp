// A call in a fixed number of bytes: literals, numbers, and of the first two tensors up to five sizes. One is
// made for each call and kept in the flight record, so it allocates nothing. Its text is made when a message
// needs it. Always: num_tensors and dim are the true counts, so a text shows where it was cut.
#include "cohort/comm/internal/signature.h"

#include <algorithm>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::comm {

Signature::Signature(const char* name, const CallDetails& details)
    : call(name),
      op(details.op),
      direction(details.direction),
      peer(details.peer),
      num_tensors(static_cast<int>(details.tensors.size())) {
  // What does not fit is left out here. The hash of the comparison has all of it.
  for (std::size_t i = 0; i < std::min(shapes.size(), details.tensors.size()); ++i) {
    const at::Tensor& tensor = details.tensors[i];
    shapes[i].dtype = tensor.scalar_type();
    shapes[i].dim = static_cast<std::int8_t>(tensor.dim());
    const auto kept = std::min<std::size_t>(shapes[i].sizes.size(), static_cast<std::size_t>(tensor.dim()));
    std::copy_n(tensor.sizes().begin(), kept, shapes[i].sizes.begin());
  }
}

std::string Signature::shape_text() const {
  base::TextList list;
  const int shown = std::min(num_tensors, static_cast<int>(shapes.size()));
  for (int i = 0; i < shown; ++i) {
    const Shape& shape = shapes[static_cast<std::size_t>(i)];
    const auto dim = static_cast<std::size_t>(shape.dim);
    const auto known = std::min(dim, shape.sizes.size());
    base::TextList sizes;
    for (std::size_t d = 0; d < known; ++d) sizes.add(shape.sizes[d]);
    if (dim > known) sizes.add("...");
    list.add(c10::scalarTypeToTypeMeta(shape.dtype).name(), "[", sizes.text(), "]");
  }
  if (num_tensors <= shown) return list.text();
  return base::concat(list.text(), " and ", num_tensors - shown, " more");
}

std::string Signature::text() const {
  std::string text = base::concat(call, " ", number);
  if (num_tensors > 0) text += " " + shape_text();
  if (op != nullptr) text += base::concat(" ", op);
  if (direction != nullptr) text += base::concat(" ", direction, " ", peer);
  return text;
}

std::string shape_text(const at::Tensor& tensor) {
  return base::concat(tensor.dtype().name(), tensor.sizes());
}

// Literals, since a Signature keeps the pointer.
const char* op_name(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      return "SUM";
    case c10d::ReduceOp::AVG:
      return "AVG";
    case c10d::ReduceOp::PRODUCT:
      return "PRODUCT";
    case c10d::ReduceOp::MIN:
      return "MIN";
    case c10d::ReduceOp::MAX:
      return "MAX";
    case c10d::ReduceOp::BAND:
      return "BAND";
    case c10d::ReduceOp::BOR:
      return "BOR";
    case c10d::ReduceOp::BXOR:
      return "BXOR";
    case c10d::ReduceOp::PREMUL_SUM:
      return "PREMUL_SUM";
    default:
      return "an unknown operation";
  }
}

}  // namespace cohort::comm
