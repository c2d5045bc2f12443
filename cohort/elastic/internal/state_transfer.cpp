// The bytes of all tensors, one after the other, are cut into chunks. Who lacks the state asks each process
// that has it for two chunks, and for the next one when a chunk has come: a process that is slow gives fewer.
// All that have the state have the same bits, so it does not matter who gives what. First it asks each of
// them for sizes and hash, and compares: a step that depends on more than the state would else mix two states
// without a word. The text, which may hold a time, is that of one process. Each chunk has a hash, which is
// made where it is sent and checked where it has been copied to.
//
// Both sides wait meanwhile: the state that is sent must not change. Bytes of a tensor on the CPU whose
// memory has no holes go from there. Any other tensor is copied first.
#include "cohort/elastic/internal/state_transfer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/internal/fault_points.h"
#include "cohort/base/text/bounded_json.h"
#include "cohort/base/text/format_list.h"
#include "cohort/checkpoint/file_writer.h"

namespace cohort::elastic {
namespace {

using base::concat;
using nlohmann::json;

constexpr const char* kWhereState = "elastic.state";
constexpr std::uint32_t kAskChannel = 2, kStateChannel = net::kAnswerChannels + 2;
constexpr int kChunksAtOnce = 2, kMaxTries = 3;
constexpr const char* kSameStateHint =
    "a step that depends on nothing but the state and its number, and the same program on all hosts";

// A tensor whose memory has each of its bytes once.
at::Tensor plain(const at::Tensor& tensor) {
  const at::Tensor here = tensor.detach().cpu();
  return here.is_non_overlapping_and_dense() ? here : here.contiguous();
}

// The tensors' bytes, one after the other.
class FlatState {
 public:
  explicit FlatState(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
    for (const at::Tensor& tensor : tensors_) {
      ends_.push_back(num_bytes() + static_cast<std::uint64_t>(tensor.nbytes()));
    }
  }
  std::uint64_t num_bytes() const { return ends_.empty() ? 0 : ends_.back(); }

  struct Piece {
    at::Tensor tensor;
    std::span<std::byte> bytes;
  };
  std::vector<Piece> pieces(std::uint64_t begin, std::uint64_t end) const {
    std::vector<Piece> pieces;
    auto i = static_cast<std::size_t>(std::ranges::upper_bound(ends_, begin) - ends_.begin());
    for (; begin < end && i < ends_.size(); ++i) {
      const std::uint64_t tensor_begin = i == 0 ? 0 : ends_[i - 1], piece_end = std::min(end, ends_[i]);
      auto* const data = static_cast<std::byte*>(tensors_[i].mutable_data_ptr());
      if (piece_end > begin)
        pieces.push_back({tensors_[i], {data + (begin - tensor_begin), piece_end - begin}});
      begin = std::max(begin, piece_end);
    }
    return pieces;
  }

 private:
  const std::vector<at::Tensor> tensors_;
  std::vector<std::uint64_t> ends_;
};

// Hashes of pieces, hashed: no byte is copied for it.
std::uint64_t hash_of_pieces(const std::vector<FlatState::Piece>& pieces) {
  std::vector<std::uint64_t> hashes;
  for (const FlatState::Piece& piece : pieces) hashes.push_back(checkpoint::checksum(piece.bytes));
  return checkpoint::checksum(std::as_bytes(std::span(hashes)));
}

json json_of_tensors(const std::vector<at::Tensor>& tensors) {
  json list = json::array();
  for (const at::Tensor& tensor : tensors) {
    list.push_back({{"sizes", tensor.sizes().vec()},
                    {"strides", tensor.strides().vec()},
                    {"type", static_cast<int>(tensor.scalar_type())}});
  }
  return list;
}

[[noreturn]] void reject_state(const std::string& what) {
  throw CommError(kWhereState, what, "the same version of Cohort on all hosts");
}

std::vector<at::Tensor> make_tensors(const json& list) {
  std::vector<at::Tensor> tensors;
  for (const json& entry : list) {
    const auto sizes = entry.at("sizes").get<std::vector<std::int64_t>>();
    const auto strides = entry.at("strides").get<std::vector<std::int64_t>>();
    const int number = entry.at("type").get<int>();
    const auto type = static_cast<at::ScalarType>(number);
    if (number < 0 || number >= static_cast<int>(at::ScalarType::NumOptions) ||
        type == at::ScalarType::Undefined) {
      reject_state(concat("a tensor of the state has type ", number));
    }
    tensors.push_back(at::empty_strided(sizes, strides, at::TensorOptions().dtype(type)));
    if (!tensors.back().is_non_overlapping_and_dense()) reject_state("a tensor of the state has holes");
  }
  return tensors;
}

void send_wire(ProcessInbox& inbox, int to, std::uint32_t channel, const Wire& wire,
               std::vector<net::Payload> payloads = {}) {
  net::Message message;
  message.channel = channel;
  message.header = encode(wire);
  message.payloads = std::move(payloads);
  if (const auto peer = inbox.peer_of(to)) peer->send(std::move(message));
}

Wire wire_of(const TransferPlace& place, WireType type) {
  return {.type = type, .from = static_cast<std::uint32_t>(place.process), .generation = place.generation};
}

ProcessInbox::WaitEnd wait_end(const TransferPlace& place, std::vector<int> needed, std::string what) {
  return {.generation = place.generation,
          .is_in_step = false,
          .needed = std::move(needed),
          .deadline = base::Deadline(place.timeout),
          .what = std::move(what)};
}

void send_chunk(ProcessInbox& inbox, const TransferPlace& place, const FlatState& flat, const Wire& asked) {
  // Without bytes: who asks has the sizes of another state.
  const bool is_here = asked.number <= asked.value && asked.value <= flat.num_bytes();
  const auto pieces = is_here ? flat.pieces(asked.number, asked.value) : std::vector<FlatState::Piece>();
  std::vector<net::Payload> payloads;
  for (const FlatState::Piece& piece : pieces) {
    payloads.push_back({std::make_shared<at::Tensor>(piece.tensor), piece.bytes, false});
  }
  Wire chunk = wire_of(place, WireType::kChunk);
  chunk.number = asked.number;
  chunk.value = asked.value;
  chunk.hash = hash_of_pieces(pieces);
  send_wire(inbox, static_cast<int>(asked.from), kStateChannel, chunk, std::move(payloads));
  if (place.on_bytes) place.on_bytes(asked.value - asked.number);
}

/// Chunks that were asked for, and that will be.
class Puller {
 public:
  Puller(ProcessInbox& inbox, const TransferPlace& place, const FlatState& flat)
      : inbox_(inbox), place_(place), flat_(flat) {
    for (std::uint64_t begin = 0; begin < flat.num_bytes(); begin += place.chunk_bytes)
      left_.push_back(begin);
  }

  void run() {
    for (int i = 0; i < kChunksAtOnce; ++i) {
      for (const int holder : place_.holders) ask(holder);
    }
    while (!asked_.empty()) {
      std::set<int> givers;
      for (const auto& [begin, holder] : asked_) givers.insert(holder);
      const std::vector<int> needed(givers.begin(), givers.end());
      const auto letters =
          inbox_.take({WireType::kChunk},
                      wait_end(place_, needed, concat("the state from process ", base::join(needed))));
      for (const Letter& letter : letters) {
        base::reach_fault_point("state copy");
        accept(letter);
      }
    }
  }

 private:
  std::uint64_t end_of(std::uint64_t begin) const {
    return std::min(begin + place_.chunk_bytes, flat_.num_bytes());
  }
  void ask(int holder) {
    if (left_.empty()) return;
    const std::uint64_t begin = left_.front();
    left_.pop_front();
    asked_[begin] = holder;
    Wire wire = wire_of(place_, WireType::kAskChunk);
    wire.number = begin;
    wire.value = end_of(begin);
    send_wire(inbox_, holder, kAskChannel, wire);
  }
  void accept(const Letter& letter) {
    const std::uint64_t begin = letter.wire.number;
    const int from = static_cast<int>(letter.wire.from);
    const auto asked = asked_.find(begin);
    if (asked == asked_.end() || asked->second != from || letter.wire.value != end_of(begin)) {
      reject_state(concat("process ", from, " sent bytes of the state that it was not asked for"));
    }
    asked_.erase(asked);
    if (letter.message.payloads.empty()) {
      throw CommError(kWhereState,
                      concat("process ", from, " has no bytes ", begin, " to ", end_of(begin),
                             ": its state is not that of process ", place_.holders.front()),
                      kSameStateHint);
    }
    const auto pieces = flat_.pieces(begin, end_of(begin));
    if (!copy(pieces, letter.message) || hash_of_pieces(pieces) != letter.wire.hash) {
      if (++num_wrong_ >= kMaxTries) {
        throw CommError(kWhereState,
                        concat("bytes ", begin, " to ", end_of(begin), " of the state of process ", from,
                               " came with another hash, the last of ", num_wrong_, " chunks"),
                        "a memory test of both hosts");
      }
      left_.push_back(begin);  // mostly another process gives it
    } else if (place_.on_bytes) {
      place_.on_bytes(end_of(begin) - begin);
    }
    ask(from);
  }
  static bool copy(const std::vector<FlatState::Piece>& pieces, const net::Message& message) {
    if (pieces.size() != message.payloads.size()) return false;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const std::span<const std::byte> bytes = message.payloads[i].bytes;
      if (bytes.size() != pieces[i].bytes.size()) return false;
      std::memcpy(pieces[i].bytes.data(), bytes.data(), bytes.size());
    }
    return true;
  }

  ProcessInbox& inbox_;
  const TransferPlace& place_;
  const FlatState& flat_;
  std::deque<std::uint64_t> left_;
  std::map<std::uint64_t, int> asked_;
  int num_wrong_ = 0;
};

}  // namespace

namespace {

// Of tensors as plain() gives them.
std::uint64_t hash_of_tensors(const std::vector<at::Tensor>& tensors) {
  const std::string layout = json_of_tensors(tensors).dump();
  std::vector<std::uint64_t> hashes{checkpoint::checksum(std::as_bytes(std::span(layout)))};
  for (const at::Tensor& tensor : tensors) {
    const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
    hashes.push_back(checkpoint::checksum({data, static_cast<std::size_t>(tensor.nbytes())}));
  }
  return checkpoint::checksum(std::as_bytes(std::span(hashes)));
}

}  // namespace

std::uint64_t hash_of(const StateSnapshot& state) {
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& tensor : state.tensors) tensors.push_back(plain(tensor));
  const std::vector<std::uint64_t> hashes{checkpoint::checksum(std::as_bytes(std::span(state.text))),
                                          hash_of_tensors(tensors)};
  return checkpoint::checksum(std::as_bytes(std::span(hashes)));
}

void serve_state(ProcessInbox& inbox, const TransferPlace& place, const StateSnapshot& state) {
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& tensor : state.tensors) tensors.push_back(plain(tensor));
  const FlatState flat(tensors);
  // The only one has nobody to differ from.
  const std::uint64_t hash = place.holders.size() > 1 ? hash_of_tensors(tensors) : 0;
  std::vector<int> missing = place.behind;
  while (!missing.empty()) {
    const auto letters = inbox.take(
        {WireType::kAskState, WireType::kAskChunk, WireType::kHasState},
        wait_end(place, missing, concat("the state to be copied by process ", base::join(missing))));
    for (const Letter& letter : letters) {
      const int from = static_cast<int>(letter.wire.from);
      if (letter.wire.type == WireType::kHasState) {
        std::erase(missing, from);
      } else if (letter.wire.type == WireType::kAskChunk) {
        send_chunk(inbox, place, flat, letter.wire);
      } else {
        Wire wire = wire_of(place, WireType::kState);
        wire.hash = hash;
        wire.text = json_of_tensors(tensors).dump();
        const auto text = std::make_shared<const std::string>(state.text);
        send_wire(inbox, from, kStateChannel, wire, {{text, std::as_bytes(std::span(*text)), false}});
      }
    }
  }
}

namespace {

// What the state consists of, by the first process that has it. Throws: CommError where another one has
// another state.
Letter ask_for_state(ProcessInbox& inbox, const TransferPlace& place) {
  for (const int holder : place.holders) {
    send_wire(inbox, holder, kAskChannel, wire_of(place, WireType::kAskState));
  }
  std::map<int, Letter> answers;
  while (answers.size() < place.holders.size()) {
    std::vector<int> missing = place.holders;
    std::erase_if(missing, [&](int holder) { return answers.contains(holder); });
    auto letters =
        inbox.take({WireType::kState},
                   wait_end(place, missing, concat("the state's sizes from process ", base::join(missing))));
    for (Letter& letter : letters) answers[static_cast<int>(letter.wire.from)] = std::move(letter);
  }
  Letter& first = answers.at(place.holders.front());
  for (const int holder : place.holders) {
    const Wire& wire = answers.at(holder).wire;
    if (wire.hash == first.wire.hash && wire.text == first.wire.text) continue;
    throw CommError(kWhereState,
                    concat("processes ", place.holders.front(), " and ", holder,
                           " have different states after the same step"),
                    kSameStateHint);
  }
  return std::move(first);
}

}  // namespace

PulledState pull_state(ProcessInbox& inbox, const TransferPlace& place, const StateSnapshot& own,
                       const std::function<void()>& before_writing) {
  const Letter letter = ask_for_state(inbox, place);
  const std::optional<json> list = base::parse_bounded_json(letter.wire.text);
  if (!list || letter.message.payloads.size() != 1) reject_state("the sizes of the state cannot be read");
  PulledState pulled;
  const auto text = letter.message.payloads.front().bytes;
  pulled.state.text.assign(reinterpret_cast<const char*>(text.data()), text.size());
  const bool fits = std::ranges::all_of(own.tensors,
                                        [](const at::Tensor& tensor) {
                                          return tensor.is_cpu() && tensor.is_non_overlapping_and_dense();
                                        }) &&
                    json_of_tensors(own.tensors) == *list;
  try {
    if (!fits) pulled.state.tensors = make_tensors(*list);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {  // of JSON, or of LibTorch: sizes that no tensor has
    reject_state(concat("the sizes of the state cannot be read: ", error.what()));
  }
  before_writing();
  if (fits) {
    for (const at::Tensor& tensor : own.tensors) pulled.state.tensors.push_back(tensor.detach());
  }
  const FlatState flat(pulled.state.tensors);
  Puller(inbox, place, flat).run();
  pulled.bytes = flat.num_bytes();
  return pulled;
}

void confirm_state(ProcessInbox& inbox, const TransferPlace& place) {
  for (const int holder : place.holders) {
    send_wire(inbox, holder, kAskChannel, wire_of(place, WireType::kHasState));
  }
}

}  // namespace cohort::elastic
