#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

/// What a C++ function did, operator by operator: docs/script.md, "The tape".
namespace cohort::script {

using Tensors = std::vector<at::Tensor>;

/// How a tensor lies in its storage. Together with the storage it says which value a tensor is.
struct Layout {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::int64_t offset = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::Device device = c10::kCPU;
  bool conjugate = false;
  bool negative = false;

  static Layout of(const at::Tensor& tensor);
  bool operator==(const Layout&) const = default;
  /// Bytes of the elements.
  std::int64_t bytes() const;
  /// True if two elements may lie in the same place.
  bool may_overlap() const;
  /// Returns "Float [16, 64]".
  std::string str() const;
};

/// True if `tensor` has these sizes and strides. A loop of its own: == of so few numbers would call memcmp(),
/// which costs more than they do.
inline bool is_laid_out(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  const c10::IntArrayRef its_sizes = tensor.sizes();
  if (its_sizes.size() != sizes.size()) return false;
  const c10::IntArrayRef its_strides = tensor.strides();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (((its_sizes[i] ^ sizes[i]) | (its_strides[i] ^ strides[i])) != 0) return false;
  }
  return true;
}
inline bool is_laid_out(const at::Tensor& tensor, const Layout& layout) {
  return is_laid_out(tensor, layout.sizes, layout.strides);
}

/// Where a value comes from.
enum class Source : std::uint8_t {
  kInput,     ///< handed in with each run
  kCaptured,  ///< a tensor of the world: a parameter, a buffer; read and written where it lies
  kConstant,  ///< made in C++ by no operator, with the same contents in two recordings
  kMade,      ///< by an operator of the tape
};

struct Value {
  Source source = Source::kMade;
  Layout layout;
  std::size_t storage = 0;  ///< values of one storage have one number
  at::Tensor tensor;        ///< where captured or constant
  bool snapshot = false;    ///< of what C++ wrote into a tensor that an operator made
};

/// In the order of Call::below_autocast.
inline constexpr std::array kAutocastKeys = {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA};

inline constexpr int kUndefined = -1;  ///< the slot of an undefined tensor
inline constexpr int kUnknown = -2;    ///< find(): not on the tape

/// A slot that is a value's, as an index.
inline std::size_t at_slot(int slot) {
  return static_cast<std::size_t>(slot);
}

/// Tensors of one argument or result of a call.
struct TensorPlace {
  enum class Kind : std::uint8_t { kTensor, kList, kOptionalList };
  std::size_t index = 0;  ///< which argument or result
  Kind kind = Kind::kTensor;
  bool fresh_handle = false;  ///< the operator changes sizes or strides: it gets a handle of its own
  std::vector<int> slots;     ///< values
  bool operator==(const TensorPlace&) const = default;
};

/// One operator that was called.
struct Call {
  explicit Call(const c10::OperatorHandle& called, c10::DispatchKeySet below = {})
      : op(called), keys(below), is_foreign(!called.operator_name().name.starts_with("aten::")) {}

  c10::OperatorHandle op;
  c10::DispatchKeySet keys;            ///< below the recorder; empty: to be found anew
  std::vector<c10::IValue> arguments;  ///< none where tensors go
  std::vector<TensorPlace> inputs;     ///< by index
  std::vector<TensorPlace> results;    ///< by index
  std::vector<c10::IValue> other;      ///< results that are no tensors
  std::size_t num_results = 0;
  bool is_view = false;  ///< results alias the first tensor and nothing is written
  bool grad_mode = false;
  std::array<bool, 2> below_autocast{};  ///< autocast was off, or called it itself: on the CPU, on CUDA
  bool is_foreign;                       ///< not LibTorch's: its results are checked in each run

  /// True if it makes a tensor as it comes, which needs no operator where memory is there.
  bool makes_blank() const;
  /// True if it looks at sizes and type of its tensors, and not at their elements.
  bool reads_shape_only() const;
  /// True if it draws random numbers, or may: an operator that is not LibTorch's.
  bool may_draw() const;
  /// Returns "aten::addmm" or "aten::add.Tensor".
  std::string name() const;
};

/// True if two tensors have the same type, sizes and bits, NaN included. Undefined ones equal each other.
bool equal_bits(const at::Tensor& a, const at::Tensor& b);

/// True if changes of `a` and `b` are counted as one, as those of a tensor and its detach() are.
bool count_together(const at::Tensor& a, const at::Tensor& b);

/// Calls fn(slot) for each given value that the schema of `call` says it writes to.
template <typename Fn>
void each_written(const Call& call, const Fn& fn) {
  if (!call.op.schema().is_mutable()) return;
  for (const TensorPlace& place : call.inputs) {
    const c10::AliasInfo* const alias = call.op.schema().arguments()[place.index].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    for (const int slot : place.slots) {
      if (slot >= 0) fn(slot);
    }
  }
}

/// Calls [begin, end) of a tape that script::fork() was given: they may run beside those that follow.
struct ForkedCalls {
  std::size_t begin = 0, end = 0;
  bool operator==(const ForkedCalls&) const = default;
};

/// The calls of one recording, in order, and the values that go between them.
/// Values are told apart by storage and layout, not by handle, because autograd wraps views anew. Storages
/// are held weakly: memory is freed as in eager mode, while no address can mean two storages. Threads: one.
class Tape {
 public:
  Tape() = default;
  /// The tape of a recording that was made elsewhere, for replay. `written`: by storage.
  Tape(std::vector<Call> calls, std::vector<Value> values, const std::vector<bool>& written,
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
  void refuse(std::string reason);
  /// Why it cannot be replayed; empty if it can.
  const std::string& refusal() const { return refusal_; }

  const std::vector<Call>& calls() const { return calls_; }
  const std::vector<Value>& values() const { return values_; }
  /// In order; none within another.
  const std::vector<ForkedCalls>& forked() const { return forked_; }
  std::size_t num_storages() const { return storages_.size(); }
  /// True if an operator wrote to this storage by the letter of its schema.
  bool is_written(std::size_t storage) const { return storages_[storage].written; }
  /// True if a call depends on where in its storage an input begins, and on how much lies around it.
  bool needs_input_storages() const { return needs_input_storages_; }

  /// Counts changes of a captured tensor from here on, before an operator uses it.
  void watch(const at::Tensor& captured);
  /// Refuses if a tensor was changed since the recording began, and by no operator of this thread.
  void check_versions();
  /// True if that was a captured tensor: then the tape is not refused, see Note [Who else writes].
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
  int use(const at::Tensor& tensor, const Call& call);
  int made(const at::Tensor& tensor, const Call& call);
  void find_contents(int slot, const at::Tensor& tensor, bool is_overwritten);
  void mark_filled(int slot, const at::Tensor& tensor);
  void snapshot(std::size_t storage, const at::Tensor& tensor);
  void check_version(const at::Tensor& tensor, int slot);
  void check_version(Version& version);
  Version& version_of(const at::Tensor& tensor, bool is_captured);
  int restride(int base, const at::Tensor& tensor);
  int resize(int base, const at::Tensor& tensor);
  void take_arguments(Call& call, const torch::jit::Stack& stack, std::vector<Written>& written);
  void take_results(Call& call, const torch::jit::Stack& stack);
  void absorb_versions(const Call& call);
  void mark_written(const std::vector<Written>& written);
  void find_new_layouts(Call& call, const std::vector<Written>& written);
  std::string difference_of_common_calls(const Tape& before) const;
  std::string difference_of_calls(const Call& mine, const Call& other) const;
  std::string difference_of_contents(int slot, const Value& mine, const Value& other,
                                     bool may_be_inputs) const;
  bool indexes_by_numbers(const Call& call) const;
  bool is_of_input(int slot) const;
  std::string user_of(int slot) const;

  std::vector<Call> calls_;
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
  std::string refusal_;
};

}  // namespace cohort::script
