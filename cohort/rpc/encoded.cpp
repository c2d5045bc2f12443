// Bytes carry no tags of types. Writer and reader agree because both follow the function's signature, which a
// caller compares with the callee's before it sends. A Reader therefore checks sizes and counts, and cannot
// notice a wrong type. Its bytes come from another process, so each length is compared with the bytes that
// are left before memory is taken for it. Tensors and references are not among the bytes: a flag there says
// whether the next entry of `tensors` or `references` belongs to the value. Decoding recurses, so kMaxDepth
// bounds the stack.
#include "cohort/rpc/encoded.h"

#include <iterator>

#include "cohort/base/error.h"

namespace cohort::rpc {
namespace {

constexpr int kMaxDepth = 200;

[[noreturn]] void reject(const std::string& what) {
  throw CommError("rpc.decode", what, "the same program on all workers");
}

}  // namespace

// LEB128, as in DWARF and WebAssembly.
void Writer::count(std::uint64_t value) {
  while (value >= 0x80) {
    encoded_.bytes.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  encoded_.bytes.push_back(static_cast<char>(value));
}

void Writer::text(std::string_view value) {
  count(value.size());
  bytes(value.data(), value.size());
}

void Writer::tensor(const at::Tensor& value) {
  number(value.defined());
  if (value.defined()) encoded_.tensors.push_back(value);
}

void Writer::reference(std::shared_ptr<Reference> value) {
  number(value != nullptr);
  if (value != nullptr) encoded_.references.push_back(std::move(value));
}

void Writer::append(Encoded other) {
  encoded_.bytes += other.bytes;
  for (at::Tensor& tensor : other.tensors) encoded_.tensors.push_back(std::move(tensor));
  for (auto& reference : other.references) encoded_.references.push_back(std::move(reference));
}

const char* Reader::take(std::size_t size) {
  const std::size_t left = encoded_.bytes.size() - position_;
  if (size > left) reject(base::concat("a value needs ", size, " bytes, but ", left, " are left"));
  const char* const data = encoded_.bytes.data() + position_;
  position_ += size;
  return data;
}

std::uint64_t Reader::any_count() {
  std::uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = static_cast<unsigned char>(*take(1));
    // Nine bytes hold 63 bits. A tenth would be shifted out of the 64, and memory has fewer bytes than that.
    if (shift > 56) reject("a count has more than 9 bytes");
    value |= static_cast<std::uint64_t>(byte & 0x7F) << shift;
    if ((byte & 0x80) == 0) return value;
  }
}

std::size_t Reader::count() {
  const std::uint64_t value = any_count();
  const std::size_t left = encoded_.bytes.size() - position_;
  if (value > left)
    reject(base::concat(value, " elements are said to follow, but ", left, " bytes are left"));
  return value;
}

std::string Reader::text() {
  const std::size_t size = count();
  return std::string(take(size), size);
}

at::Tensor Reader::tensor() {
  if (!number<bool>()) return at::Tensor();
  if (next_tensor_ == encoded_.tensors.size()) {
    reject(base::concat("more tensors are said to be there than the ", next_tensor_, " that came"));
  }
  return encoded_.tensors[next_tensor_++];
}

std::shared_ptr<Reference> Reader::reference() {
  if (!number<bool>()) return nullptr;
  if (next_reference_ == encoded_.references.size()) {
    reject(base::concat("more references are said to be there than the ", next_reference_, " that came"));
  }
  return encoded_.references[next_reference_++];
}

void Reader::finish() const {
  if (position_ != encoded_.bytes.size() || next_tensor_ != encoded_.tensors.size() ||
      next_reference_ != encoded_.references.size()) {
    reject(base::concat(encoded_.bytes.size() - position_, " bytes, ", encoded_.tensors.size() - next_tensor_,
                        " tensors and ", encoded_.references.size() - next_reference_,
                        " references are left after the last value"));
  }
}

Encoded Reader::rest() {
  Encoded rest;
  rest.bytes = encoded_.bytes.substr(position_);
  const auto first_tensor = static_cast<std::ptrdiff_t>(next_tensor_),
             first_reference = static_cast<std::ptrdiff_t>(next_reference_);
  if (source_ != nullptr) {
    rest.tensors.assign(std::make_move_iterator(source_->tensors.begin() + first_tensor),
                        std::make_move_iterator(source_->tensors.end()));
    rest.references.assign(std::make_move_iterator(source_->references.begin() + first_reference),
                           std::make_move_iterator(source_->references.end()));
  } else {
    rest.tensors.assign(encoded_.tensors.begin() + first_tensor, encoded_.tensors.end());
    rest.references.assign(encoded_.references.begin() + first_reference, encoded_.references.end());
  }
  position_ = encoded_.bytes.size();
  next_tensor_ = encoded_.tensors.size();
  next_reference_ = encoded_.references.size();
  return rest;
}

Reader::Level::Level(Reader& reader) : reader_(reader) {
  if (reader.depth_ == kMaxDepth) reject(base::concat("values are nested deeper than ", kMaxDepth));
  ++reader.depth_;
}

void Reader::reject_alternative(std::size_t index, std::size_t size) {
  reject(base::concat("alternative ", index, " of a variant that has ", size));
}

}  // namespace cohort::rpc
