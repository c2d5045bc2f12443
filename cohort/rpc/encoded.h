#pragma once

#include <ATen/core/Tensor.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

/// Values on their way to another process: bytes, and tensors beside them that are not copied.
/// cohort/rpc/codec.h says how a value of each type is written.
namespace cohort::rpc {

static_assert(std::endian::native == std::endian::little,
              "numbers travel in the order of a little-endian machine");

class Reference;

/// What was written. Tensors share the memory of those that were written, so who writes into one of them
/// before it has been sent changes what is sent.
struct Encoded {
  std::string bytes;                     ///< numbers and texts, in the order in which they were written
  std::vector<at::Tensor> tensors = {};  ///< the defined ones, in the order in which they were written
  std::vector<std::shared_ptr<Reference>> references = {};  ///< to objects of workers, likewise
};

/// Appends values to an `Encoded`.
class Writer {
 public:
  /// A number, as it lies in memory.
  template <typename T>
    requires std::is_arithmetic_v<T>
  void number(T value) {
    bytes(&value, sizeof value);
  }
  /// How many elements follow: 7 bits a byte, the lowest first.
  void count(std::uint64_t value);
  /// A length, and that many bytes.
  void text(std::string_view value);
  /// A tensor, which goes beside the bytes; may be undefined.
  void tensor(const at::Tensor& value);
  /// Null too.
  void reference(std::shared_ptr<Reference> value);

  /// Bytes, tensors and references of another value.
  void append(Encoded other);

  /// Returns what was written; nothing is there afterwards.
  Encoded take() { return std::move(encoded_); }

 private:
  void bytes(const void* data, std::size_t size) {
    encoded_.bytes.append(static_cast<const char*>(data), size);
  }

  Encoded encoded_;
};

/// Reads what another process wrote. Nothing that it says is trusted: a value that does not fit into the
/// bytes that are left throws CommError before memory is reserved for it.
class Reader {
 public:
  /// `encoded` outlives the reader.
  explicit Reader(const Encoded& encoded) : encoded_(encoded) {}
  /// Of a value whose tensors and references rest() takes away, so that nothing here holds them after it.
  explicit Reader(Encoded* encoded) : encoded_(*encoded), source_(encoded) {}

  /// A number as Writer::number() wrote it; T must be the same type.
  template <typename T>
    requires std::is_arithmetic_v<T>
  T number() {
    const char* const from = take(sizeof(T));
    if constexpr (std::is_same_v<T, bool>) {
      return *from != 0;
    } else {
      T value;
      std::memcpy(&value, from, sizeof value);
      return value;
    }
  }
  /// At most the number of bytes that are left: each element takes at least one.
  std::size_t count();
  /// What the functions of the same names of Writer wrote.
  std::string text();
  at::Tensor tensor();
  std::shared_ptr<Reference> reference();
  /// Throws: CommError where something is left.
  void finish() const;
  std::size_t num_bytes_left() const { return encoded_.bytes.size() - position_; }
  /// What is left, as a value of its own: nothing is left afterwards.
  Encoded rest();
  /// A number as count() writes it, of any size.
  std::uint64_t any_count();

  /// Throws: CommError.
  [[noreturn]] static void reject_alternative(std::size_t index, std::size_t size);

  /// One level of nesting deeper, for types that hold themselves. Throws: CommError below level 200.
  class Level {
   public:
    explicit Level(Reader& reader);
    ~Level() { --reader_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Reader& reader_;
  };

 private:
  const char* take(std::size_t size);

  const Encoded& encoded_;
  Encoded* const source_ = nullptr;
  std::size_t position_ = 0, next_tensor_ = 0, next_reference_ = 0;
  int depth_ = 0;
};

}  // namespace cohort::rpc
