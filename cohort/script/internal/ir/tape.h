#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "cohort/script/internal/ir/call.h"

/// What a C++ function did, operator by operator: docs/design/script.md, "The tape".
namespace cohort::script {

/// True if changes of `a` and `b` are counted as one, as those of a tensor and its detach() are.
bool count_together(const at::Tensor& a, const at::Tensor& b);

/// The calls of one recording, in order, and the values that go between them.
/// Values are told apart by storage and layout, not by handle, because autograd wraps views anew. Storages
/// are held weakly: memory is freed as in eager mode, while no address can mean two storages. Threads: one.
class Tape {
 public:
  Tape() = default;
  /// The tape of a recording that was made elsewhere, for replay. `written`: by storage.
  Tape(std::vector<OperatorCall> calls, std::vector<Value> values, const std::vector<bool>& written,
       std::vector<ForkedCalls> forked);

  /// Makes `tensor` an input; returns its slot. Undefined ones are kUndefined.
  /// An input that shares memory with an earlier value is a slot of its own only if its layout differs.
  int add_input(const at::Tensor& tensor);
  /// Runs `op` on `stack`, below the recorder, and writes it down.
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  /// Says that the calls between are a forked part. One within another belongs to that one.
  void begin_fork();
  void end_fork();
  /// Returns the slot of a tensor; kUnknown where no call or input had it.
  int find(const at::Tensor& tensor) const;
  /// As find(), of what the function returns: memory that kernels filled without an operator counts as read.
  int find_result(const at::Tensor& tensor);
  /// True if a value of `tensor`'s storage is on the tape.
  bool knows_storage(const at::Tensor& tensor) const;

  /// Says that this tape cannot be replayed; the first reason stays.
  void mark_unsupported(std::string reason);
  /// Why it cannot be replayed; empty if it can.
  const std::string& unsupported_reason() const { return unsupported_reason_; }

  /// The calls so far, in order.
  const std::vector<OperatorCall>& calls() const { return calls_; }
  /// The values so far, by slot.
  const std::vector<Value>& values() const { return values_; }
  /// In order; none within another.
  const std::vector<ForkedCalls>& forked() const { return forked_; }
  /// How many storages the values have: Value::storage is below that.
  std::size_t num_storages() const { return storages_.size(); }
  /// True if an operator wrote to this storage by the letter of its schema.
  bool is_written(std::size_t storage) const { return storages_[storage].written; }
  /// True if a call depends on where in its storage an input begins, and on how much lies around it.
  bool needs_input_storages() const { return needs_input_storages_; }

  /// Counts changes of a captured tensor from here on, before an operator uses it.
  void watch(const at::Tensor& captured);
  /// Rejects if a tensor was changed since the recording began, and by no operator of this thread.
  void check_versions();
  /// True if that was a captured tensor: then the tape is not unsupported for it, see Note [Who else writes].
  bool captured_was_changed() const { return captured_was_changed_; }
  /// Returns how this recording differs from `before`, naming the operator; empty if it does not. Tensors
  /// that are new in each, with the same contents, become constants here. `before_is_program`: contents that
  /// C++ wrote are known to depend on no input.
  std::string difference(const Tape& before, bool before_is_program = false);
  /// The same, of the operators and values that there are here so far.
  std::string difference_so_far(const Tape& before) const;
  /// Returns one line per call.
  std::string str() const;

 private:
  struct Key {
    const c10::StorageImpl* storage;
    Layout layout;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    std::size_t operator()(const Key& key) const;
  };
  // Which elements of a storage operators have not filled: those may be C++'s.
  enum class Unfilled : std::uint8_t {
    kNone,
    kAll,      // made by an operator that leaves them as they come
    kSome,     // the same, and parts were overwritten since: Storage::filled
    kFactory,  // made by an operator without tensors, and not used yet: C++ may have written over it
  };
  struct Storage {
    c10::weak_intrusive_ptr<c10::StorageImpl> held;
    int first = kUndefined;  // the first value of it
    std::size_t bytes = 0;   // as operators left it
    bool made = false;       // by an operator
    bool written = false;
    Unfilled unfilled = Unfilled::kNone;
    at::Tensor filled;        // kSome: a bool for each element of the first value's type
    std::size_t made_by = 0;  // kFactory: the call
  };
  // A version counter, and what it may count without anybody else writing.
  struct Version {
    c10::VariableVersion counter;
    std::uint32_t seen = 0;
    std::uint32_t writes = 0;  // by operators of the tape, since
    bool is_captured = false;
  };
  struct Written {
    at::Tensor tensor;
    std::size_t place;
    int slot;
    bool is_overwritten;  // all of it, by values that do not depend on those before
  };

  int add(const at::Tensor& tensor, Source source);
  int use(const at::Tensor& tensor, const OperatorCall& call);
  int made(const at::Tensor& tensor, const OperatorCall& call);
  void find_contents(int slot, const at::Tensor& tensor, bool is_overwritten);
  void mark_filled(int slot, const at::Tensor& tensor);
  void snapshot(std::size_t storage, const at::Tensor& tensor);
  void check_version(const at::Tensor& tensor, int slot);
  void check_version(Version& version);
  Version& version_of(const at::Tensor& tensor, bool is_captured);
  int restride(int base, const at::Tensor& tensor);
  int resize(int base, const at::Tensor& tensor);
  void take_arguments(OperatorCall& call, const torch::jit::Stack& stack, std::vector<Written>& written);
  void take_results(OperatorCall& call, const torch::jit::Stack& stack);
  void absorb_versions(const OperatorCall& call);
  void mark_written(const std::vector<Written>& written);
  void find_new_layouts(OperatorCall& call, const std::vector<Written>& written);
  std::string difference_of_common_calls(const Tape& before) const;
  std::string difference_of_calls(const OperatorCall& call, const OperatorCall& other) const;
  std::string difference_of_contents(int slot, const Value& value, const Value& other,
                                     bool may_be_inputs) const;
  bool indexes_by_numbers(const OperatorCall& call) const;
  bool is_of_input(int slot) const;
  std::string user_of(int slot) const;

  std::vector<OperatorCall> calls_;
  std::vector<Value> values_;
  std::vector<ForkedCalls> forked_;
  int open_forks_ = 0;
  std::vector<Storage> storages_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> storage_numbers_;
  std::unordered_map<Key, int, KeyHash> slots_;
  std::unordered_map<const void*, Version> versions_;  // by counter
  bool needs_input_storages_ = false;
  bool captured_was_changed_ = false;
  bool has_inputs_ = false;
  std::size_t inputs_hash_ = 0;  // of their contents
  std::string unsupported_reason_;
};

}  // namespace cohort::script
