#include "cohort/core/nested.h"

#include <sstream>

#include "cohort/base/error.h"

namespace cohort::core {

void NestedPath::write(std::ostream& out) const {
  if (parent_ != nullptr) parent_->write(out);
  if (write_ != nullptr) write_(out, step_);
}

std::string NestedPath::str() const {
  std::ostringstream out;
  write(out);
  return out.str();
}

namespace nested_detail {

void mismatch(const NestedPath& path, const std::string& expected, const std::string& got) {
  const std::string where = path.str();
  throw UsageError("core.zip_tensors",
                   base::concat("the two structures differ at ", where.empty() ? "the top" : where,
                                ": the first has ", expected, ", the second ", got),
                   "two values with the same lengths, keys and optional parts");
}

void wrong_count(const char* where, std::size_t got, std::size_t expected) {
  throw UsageError(where, base::concat("got ", got, " tensors, expected ", expected),
                   "as many tensors as flatten_tensors returned");
}

}  // namespace nested_detail
}  // namespace cohort::core
