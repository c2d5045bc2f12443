// Fuzzes what reads the messages of other workers: the tables of references and tensors, what agents tell
// each other, and values of each kind of type. Any bytes give a value, or a CommError. A tensor lies within
// the bytes that came.
//
// An input is the number of payloads, the length of each (a byte), the payloads, and the header of the
// message.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/codec.h"
#include "cohort/rpc/context_id.h"
#include "cohort/rpc/internal/agent/agent_messages.h"
#include "cohort/rpc/internal/agent/member_protocol.h"
#include "cohort/rpc/internal/agent/running_calls.h"
#include "cohort/rpc/internal/caller_state.h"
#include "cohort/rpc/internal/context_state.h"
#include "cohort/rpc/internal/idle_reports.h"
#include "cohort/rpc/internal/owner_optimizer.h"
#include "cohort/rpc/internal/protocol/context_protocol.h"
#include "cohort/rpc/internal/protocol/reference_protocol.h"
#include "cohort/rpc/internal/wire.h"
#include "cohort/rpc/remote_exception.h"

namespace cohort::rpc {

struct FuzzedTree {
  std::int32_t value = 0;
  std::vector<FuzzedTree> children;
  std::unique_ptr<FuzzedTree> next;
};
COHORT_NESTED(FuzzedTree, value, children, next)

struct FuzzedArguments {
  std::vector<std::vector<std::int16_t>> numbers;
  std::map<std::string, std::optional<double>> map;
  std::variant<std::monostate, bool, std::string, at::Tensor> variant;
  std::array<std::pair<float, std::int8_t>, 2> array;
  std::optional<at::Tensor> tensor;
  std::vector<at::Tensor> tensors;
};
COHORT_NESTED(FuzzedArguments, numbers, map, variant, array, tensor, tensors)

namespace {

constexpr std::int64_t kMaxDense = 4096;  // elements and entries of what LibTorch makes dense here
constexpr int kOptionsKind = 32, kStateKind = 33, kTreeKind = 34;  // arguments of functions
constexpr int kMemberKind = 35;                                    // has a channel of its own

void check(bool holds) {
  if (!holds) std::abort();
}

net::Message message_of(std::string_view bytes) {
  const auto take = [&bytes](std::size_t size) {
    const std::string_view taken = bytes.substr(0, size);
    bytes.remove_prefix(taken.size());
    return taken;
  };
  const std::string_view first = take(1);
  std::vector<std::size_t> lengths;
  for (const char length : take(first.empty() ? 0 : static_cast<unsigned char>(first[0]) % 6)) {
    lengths.push_back(static_cast<unsigned char>(length));
  }
  net::Message message;
  for (const std::size_t length : lengths) {
    const std::string_view payload = take(length);
    const std::shared_ptr<std::byte> memory = allocate_payload(payload.size());
    if (!payload.empty()) std::memcpy(memory.get(), payload.data(), payload.size());
    // Some lie in memory of the sender.
    message.payloads.push_back({memory, {memory.get(), payload.size()}, message.payloads.size() % 4 < 2});
  }
  message.header = bytes;
  return message;
}

// Reads each byte, for the address sanitizer.
void touch(const at::Tensor& dense) {
  const auto* const data = static_cast<const unsigned char*>(dense.const_data_ptr());
  unsigned char sum = 0;
  for (std::size_t i = 0; i < dense.nbytes(); ++i) sum = static_cast<unsigned char>(sum ^ data[i]);
  asm volatile("" : : "r"(sum));
}

void check_tensor(const at::Tensor& tensor) {
  const at::Tensor value = tensor.detach();
  if (!value.is_sparse()) return touch(value);
  touch(value._indices());
  touch(value._values());
  check(value._indices().size(1) == value._nnz() && value._values().size(0) == value._nnz());
  if (value.scalar_type() != at::kFloat || std::max(value.numel(), value._nnz()) > kMaxDense) return;
  try {
    check(value.to_dense().sizes() == value.sizes());
  } catch (const c10::Error&) {  // LibTorch may have no such operator
  }
}

// A worker sends on what it got.
void check_round_trip(const Encoded& encoded, const std::vector<WireReference>& references) {
  net::Message message = to_message(1, encoded);
  add_references(message, references);
  const auto [again, references_again] = to_encoded(message);
  check(again.bytes == encoded.bytes && references_again.size() == references.size());
  check(again.tensors.size() == encoded.tensors.size());
  for (std::size_t i = 0; i < again.tensors.size(); ++i) {
    const at::Tensor &before = encoded.tensors[i], &after = again.tensors[i];
    check(before.sizes() == after.sizes() && before.scalar_type() == after.scalar_type());
    check(before.layout() == after.layout() && before.requires_grad() == after.requires_grad());
    check(!before.is_sparse() || before.is_coalesced() == after.is_coalesced());
  }
}

// What was read is written, read and written again: the same bytes.
template <typename T>
void read_value(Reader& in) {
  const T value = decode<T>(in);
  Writer first, second;
  encode(first, value);
  const Encoded written = first.take();
  Reader again(written);
  encode(second, decode<T>(again));
  again.finish();
  check(second.take().bytes == written.bytes);
}

void read_call(Reader& in, bool is_make) {
  CallArrivals arrivals;
  in.number<std::int64_t>();
  if (!is_make) arrivals.add(in.number<std::uint64_t>());
  in.text();
  if (is_make) {
    in.number<std::uint64_t>();
    in.number<std::uint64_t>();
    in.text();
  }
  read_value<std::optional<std::string>>(in);  // the channel
  read_value<std::optional<RecordedPlace>>(in);
  const auto state = decode<CallerState>(in);
  {
    const CallerStateScope scope(state);
    check(at::GradMode::is_enabled() == state.grad_mode);
  }
  const Encoded arguments = in.rest();
  Reader reader(arguments);
  read_value<FuzzedArguments>(reader);
  reader.finish();
}

void read_error(Reader& in) {
  const auto error = decode<RemoteException>(in);
  try {
    throw_remote(error, "f on w1, call 1");
  } catch (const std::exception&) {
  }
}

// Worker 0, which has an object and a reference to one of worker 1, and has passed both on. Workers 1 and 2
// say what they like. Once they are dead, nothing is left of it.
void read_reference_messages(Reader& in) {
  ReferenceProtocol protocol(0);
  ReferenceProtocol::Effects effects;
  const auto own = protocol.create_here(), remote = protocol.create(1);
  const WireReference asked = protocol.describe(remote);
  protocol.on_message(1, {ReferenceMessage::Type::kConfirmed, asked.object, asked.fork}, effects);
  protocol.send(own, 2);
  protocol.send(remote, 2);
  try {
    while (true) {
      const std::int32_t from = 1 + in.number<std::uint8_t>() % 2;
      protocol.on_message(from, read_reference_message(in), effects);
    }
  } catch (const CommError&) {  // there are no more
  }
  protocol.on_down(1, effects);
  protocol.on_down(2, effects);
  protocol.release(own, effects);
  protocol.release(remote, effects);
  check(protocol.num_holds() == 0 && protocol.num_objects() == 0 && protocol.num_passed_on() == 0);
}

// Worker 0, which has a context and a copy of one of worker 1's, and has made a call in both. Workers 1 and 2
// say what they like, also of contexts of further workers. Once all are dead, nothing is left of their
// contexts.
void read_context_messages(Reader& in) {
  ContextProtocol protocol(0);
  ContextProtocol::Effects effects;
  const ContextId own = protocol.create(), remote{1, 5};
  protocol.begin_call(protocol.copy_of(own), 1);
  protocol.begin_call(protocol.on_call(2, remote), 2);
  std::set<std::int32_t> workers{1, 2};
  try {
    while (true) {
      const std::int32_t from = 1 + in.number<std::uint8_t>() % 2;
      const ContextMessage message = read_context_message(in);
      if (message.context.creator != own.creator) workers.insert(message.context.creator);
      protocol.on_message(from, message, effects);
    }
  } catch (const CommError&) {  // there are no more
  }
  for (const std::int32_t worker : workers) protocol.on_down(worker, effects);
  protocol.end(own, effects);
  check(protocol.num_copies() == 0 && protocol.size() == 0);
}

void read_idle_report(Reader& in) {
  IdleReports reports;
  reports.resize(3);
  for (std::size_t worker = 0; worker < 3; ++worker) {
    reports.set(worker, decode<std::optional<IdleReport>>(in));
    reports.is_over();
  }
}

// As AgentState::take() does.
void read_message(const Encoded& encoded) {
  Reader in(encoded);
  const int kind = in.number<std::uint8_t>();
  in.number<std::uint64_t>();
  switch (kind) {
    case static_cast<int>(MessageKind::kCall):
    case static_cast<int>(MessageKind::kMake):
      return read_call(in, kind == static_cast<int>(MessageKind::kMake));
    case static_cast<int>(MessageKind::kResult):
      return read_value<FuzzedArguments>(in);
    case static_cast<int>(MessageKind::kError):
      return read_error(in);
    case static_cast<int>(MessageKind::kCancel):
      CallArrivals().cancel(in.number<std::uint64_t>());
      return read_error(in);
    case static_cast<int>(MessageKind::kReference):
      return read_reference_messages(in);
    case static_cast<int>(MessageKind::kContext):
      return read_context_messages(in);
    case static_cast<int>(MessageKind::kLeaving):
      return read_idle_report(in);
    case kMemberKind:
      return read_value<MemberMessage>(in);
    case kOptionsKind:
      return read_value<optim::OptimizerOptions>(in);
    case kStateKind:
      return read_value<optim::OptimizerState>(in);
    case kTreeKind:
      return read_value<FuzzedTree>(in);
    default:
      return;
  }
}

}  // namespace
}  // namespace cohort::rpc

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::rpc;
  try {
    cohort::net::Message message = message_of({reinterpret_cast<const char*>(data), size});
    const auto [encoded, references] = to_encoded(message);
    for (const at::Tensor& tensor : encoded.tensors) check_tensor(tensor);
    check_round_trip(encoded, references);
    read_message(encoded);
  } catch (const cohort::CommError&) {
  }
  return 0;
}
