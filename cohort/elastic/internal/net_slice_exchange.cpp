// An operation has a number, which is the same on all processes, as they make the same calls. Bytes are sent
// when it begins, and read when somebody waits for this or another operation. So no order of waits can block
// two processes.
//
// Long pieces are not copied by the sender. On one host the receiver maps the memory from which they come
// (net's handles), and copies them to where they belong; that is the only copy. The sender's memory is its
// own again when the receiver has said that it has read them (kTaken). net lends memory for good, as a rule.
// Here the sender keeps it, as no receiver reads after kTaken.
//
// Each message says how long its sender has worked in the step before: its time from commit to commit without
// its waits for others. The message is read within this step, so all times that a process has at its end are
// of the same step. They need no clock that hosts share. A slow network is not seen in them, as all wait for
// it alike.
//
// A receiver of a generation that has ended may read for a while longer. So memory of a transfer that has
// thrown is not written again: VirtualRankSync takes other memory with each exchange.
#include "cohort/elastic/internal/net_slice_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/internal/fault_points.h"
#include "cohort/base/text/format_list.h"

namespace cohort::elastic {
namespace {

using base::concat;

constexpr const char* kWhereExchange = "elastic.slice_exchange";
// What the receiver waits for, so that its window does not hold it back.
constexpr std::uint32_t kSliceChannel = net::kAnswerChannels + 1;

std::span<std::byte> bytes_of_tensor(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), static_cast<std::size_t>(tensor.nbytes())};
}

void copy_bytes(std::span<std::byte> to, std::span<const std::byte> from) {
  if (!from.empty() && to.data() != from.data()) std::memmove(to.data(), from.data(), from.size());
}

}  // namespace

struct NetSliceExchange::Operation {
  const char* name;
  std::uint64_t number = 0;
  std::map<int, Bytes> expected;    // by process; what has come is taken away
  std::set<int> unread;             // processes that have not said that they have read what was sent
  std::vector<at::Tensor> tensors;  // stay until the end

  bool is_done() const { return expected.empty() && unread.empty(); }
};

NetSliceExchange::NetSliceExchange(std::shared_ptr<net::Node> node, std::shared_ptr<ProcessInbox> inbox,
                                   const ExchangePlace& place)
    : node_(std::move(node)), inbox_(std::move(inbox)), place_(place) {
  for (int process = 0; process < place_.num_processes; ++process) {
    peers_.push_back(process == place_.process ? nullptr : inbox_->peer_of(process));
  }
  work_us_.assign(peers_.size(), 0);
}

std::vector<double> NetSliceExchange::end_step(std::chrono::nanoseconds time) {
  using std::chrono::microseconds;
  std::vector<double> seconds;
  for (const std::uint32_t us : work_us_) seconds.push_back(us * 1e-6);
  std::ranges::fill(work_us_, 0);  // what does not come again is not known
  const auto most = static_cast<microseconds::rep>(std::numeric_limits<std::uint32_t>::max());
  const auto own = std::chrono::duration_cast<microseconds>(time - waited_).count();
  work_us_[static_cast<std::size_t>(place_.process)] =
      static_cast<std::uint32_t>(std::clamp<microseconds::rep>(own, 0, most));
  waited_ = std::chrono::nanoseconds(0);
  step_began_.reset();
  return seconds;
}

at::Tensor NetSliceExchange::empty(std::int64_t numel, const at::TensorOptions& options) {
  const std::size_t bytes = static_cast<std::size_t>(numel) * options.dtype().itemsize();
  const bool is_cpu = options.device().is_cpu();
  if (!is_cpu || place_.num_processes == 1 || bytes < net::kLeastBytesByHandle) {
    return at::empty({numel}, options);
  }
  std::shared_ptr<std::byte> memory = node_->allocate_shared(bytes);
  void* const data = memory.get();
  return at::from_blob(
      data, {numel}, [memory = std::move(memory)](void*) mutable { memory.reset(); }, options);
}

void NetSliceExchange::check_cpu(const at::Tensor& tensor) const {
  if (tensor.is_cpu() && tensor.is_contiguous()) return;
  throw UsageError(kWhereExchange, concat("got a tensor on ", tensor.device().str(),
                                          tensor.is_contiguous() ? "" : " that is not contiguous",
                                          ", expected a contiguous one on the CPU"));
}

std::shared_ptr<NetSliceExchange::Operation> NetSliceExchange::begin(const char* name,
                                                                     std::vector<at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) check_cpu(tensor);
  auto operation = std::make_shared<Operation>();
  operation->name = name;
  operation->number = num_begun_++;
  operation->tensors = std::move(tensors);
  pending_[operation->number] = operation;
  return operation;
}

void NetSliceExchange::send(Operation& operation, int to, std::span<const std::byte> bytes,
                            const at::Tensor& owner) {
  const std::shared_ptr<net::Peer>& peer = peers_[static_cast<std::size_t>(to)];
  if (bytes.empty() || peer == nullptr) return;  // one that is gone: finish() says so
  const bool is_long = bytes.size() >= net::kLeastBytesByHandle;
  net::Message message;
  message.channel = kSliceChannel;
  message.header = encode({.type = WireType::kSlice,
                           .from = static_cast<std::uint32_t>(place_.process),
                           .work_us = work_us_[static_cast<std::size_t>(place_.process)],
                           .generation = place_.generation,
                           .number = operation.number,
                           .value = is_long ? 1U : 0U});
  if (is_long) {
    message.payloads.push_back({std::make_shared<at::Tensor>(owner), bytes, true});
    operation.unread.insert(to);
  } else {
    const auto copy = std::make_shared<std::vector<std::byte>>(bytes.begin(), bytes.end());
    message.payloads.push_back({copy, *copy, false});
  }
  peer->send(std::move(message));
}

void NetSliceExchange::expect(Operation& operation, int from, Bytes to) {
  if (!to.empty()) operation.expected[from] = to;
}

parallel::SliceExchange::Transfer NetSliceExchange::transfer_of(std::shared_ptr<Operation> operation) {
  return [self = shared_from_this(), operation = std::move(operation)] { self->finish(*operation); };
}

void NetSliceExchange::read_slice(Operation& operation, int from, const Letter& letter) {
  const auto expected = operation.expected.find(from);
  std::size_t size = 0;
  for (const net::Payload& payload : letter.message.payloads) size += payload.bytes.size();
  if (expected == operation.expected.end() || expected->second.size() != size) {
    throw CommError(
        kWhereExchange,
        concat(operation.name, " ", operation.number, ": process ", from, " sent ", size, " bytes, expected ",
               expected == operation.expected.end() ? 0 : expected->second.size()),
        "the same calls in the same order on all processes");
  }
  copy_bytes(expected->second, letter.message.payloads.front().bytes);
  operation.expected.erase(expected);
}

void NetSliceExchange::handle(Letter& letter) {
  const int from = static_cast<int>(letter.wire.from);
  const std::uint64_t number = letter.wire.number;
  const auto pending = pending_.find(number);
  if (letter.wire.type == WireType::kTaken) {
    if (pending != pending_.end()) pending->second->unread.erase(from);
    return;
  }
  if (number >= num_begun_) {
    early_[{number, from}] = std::move(letter);
    return;
  }
  if (pending == pending_.end()) {
    throw CommError(kWhereExchange, concat("process ", from, " sent bytes of exchange ", number, " twice"));
  }
  read_slice(*pending->second, from, letter);
  work_us_[static_cast<std::size_t>(from)] = letter.wire.work_us;
  const bool is_waited_for = letter.wire.value != 0;
  letter.message = {};  // the memory is not read any more
  if (!is_waited_for) return;
  net::Message taken;
  taken.channel = kSliceChannel;
  taken.header = encode({.type = WireType::kTaken,
                         .from = static_cast<std::uint32_t>(place_.process),
                         .generation = place_.generation,
                         .number = number});
  if (const auto& peer = peers_[static_cast<std::size_t>(from)]) peer->send(std::move(taken));
}

void NetSliceExchange::finish(Operation& operation) {
  static const std::set<WireType> kTypes = {WireType::kSlice, WireType::kTaken};
  const auto is_pending = [&] { return pending_.contains(operation.number); };
  if (!is_pending()) return;  // a second call
  base::reach_fault_point("exchange");
  const base::Deadline deadline(place_.timeout);
  // Those that came before their operation began here.
  while (!early_.empty() && early_.begin()->first.first < num_begun_) {
    Letter letter = std::move(early_.begin()->second);
    early_.erase(early_.begin());
    handle(letter);
  }
  while (!operation.is_done()) {
    std::set<int> needed = operation.unread;
    for (const auto& [process, bytes] : operation.expected) needed.insert(process);
    const std::vector<int> list(needed.begin(), needed.end());
    const auto began = base::Deadline::Clock::now();
    std::vector<Letter> letters = inbox_->take(
        kTypes, {.generation = place_.generation,
                 .is_in_step = true,
                 .needed = list,
                 .deadline = deadline,
                 .what = concat(operation.name, " ", operation.number, " of generation ", place_.generation,
                                ", in which process ", place_.process, " waits for ", base::join(list))});
    waited_ += base::Deadline::Clock::now() - began;
    for (Letter& letter : letters) handle(letter);
  }
  pending_.erase(operation.number);
  operation.tensors.clear();
}

parallel::SliceExchange::Transfer NetSliceExchange::all_to_all(at::Tensor output, const at::Tensor& input,
                                                               const std::vector<std::int64_t>& output_bytes,
                                                               const std::vector<std::int64_t>& input_bytes) {
  const auto operation = begin("all_to_all", {output, input});
  const std::span<std::byte> in = bytes_of_tensor(input), out = bytes_of_tensor(output);
  std::size_t in_begin = 0, out_begin = 0;
  for (int process = 0; process < place_.num_processes; ++process) {
    const auto in_size = static_cast<std::size_t>(input_bytes.at(static_cast<std::size_t>(process)));
    const auto out_size = static_cast<std::size_t>(output_bytes.at(static_cast<std::size_t>(process)));
    if (in_size > in.size() - in_begin || out_size > out.size() - out_begin ||
        (process == place_.process && in_size != out_size)) {
      throw UsageError(kWhereExchange, concat("pieces of process ", process, " have ", in_size, " and ",
                                              out_size, " bytes, which do not fit"));
    }
    if (process == place_.process) {
      copy_bytes(out.subspan(out_begin, out_size), in.subspan(in_begin, in_size));
    } else {
      send(*operation, process, in.subspan(in_begin, in_size), input);
      expect(*operation, process, out.subspan(out_begin, out_size));
    }
    in_begin += in_size;
    out_begin += out_size;
  }
  return transfer_of(operation);
}

parallel::SliceExchange::Transfer NetSliceExchange::all_gather(at::Tensor output, const at::Tensor& input) {
  const auto operation = begin("all_gather", {output, input});
  const std::span<std::byte> in = bytes_of_tensor(input), out = bytes_of_tensor(output);
  const std::size_t size = in.size();
  if (out.size() != size * static_cast<std::size_t>(place_.num_processes)) {
    throw UsageError(kWhereExchange, concat("the output of all_gather has ", out.size(), " bytes, expected ",
                                            place_.num_processes, " times ", size));
  }
  for (int process = 0; process < place_.num_processes; ++process) {
    const std::span<std::byte> piece = out.subspan(static_cast<std::size_t>(process) * size, size);
    if (process == place_.process) {
      copy_bytes(piece, in);
    } else {
      send(*operation, process, in, input);
      expect(*operation, process, piece);
    }
  }
  return transfer_of(operation);
}

parallel::SliceExchange::Transfer NetSliceExchange::broadcast(at::Tensor bytes) {
  const auto operation = begin("broadcast", {bytes});
  if (place_.process != 0) {
    expect(*operation, 0, bytes_of_tensor(bytes));
  } else {
    for (int process = 1; process < place_.num_processes; ++process) {
      send(*operation, process, bytes_of_tensor(bytes), bytes);
    }
  }
  return transfer_of(operation);
}

}  // namespace cohort::elastic
