// Each rank waits until all have come. It measures its clock against rank 0's where these differ. All agree
// on the earliest start as time zero. Then rank 0 takes the events of each rank in turn, in pieces, and
// writes them to one file. The offset of a clock is that of the shortest of several round trips over the
// store. Always: rank 0 receives all events even where it cannot write, since each rank waits for the result.
// Keys bear the number of the round; a round removes those of the round before, which all ranks have left.
#include "cohort/comm/trace.h"

#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <fstream>
#include <limits>
#include <optional>

#include "cohort/base/error.h"
#include "cohort/base/files/atomic_file.h"
#include "cohort/base/key_value_store.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/base/timeline.h"
#include "cohort/comm/internal/deadline_store.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/comm/store_adapter.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using Clock = base::Timeline::Clock;

constexpr int kRounds = 16;
// Bounds the memory of rank 0, however much a rank has recorded.
constexpr std::int64_t kPieceBytes = 16 << 20;

// The same for all processes that read the same steady clock.
std::string clock_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

// One write_trace() on one rank.
class Tracing {
 public:
  Tracing(const Group& group, TraceOptions options)
      : group_(group),
        state_(*group.shared_state()),
        options_(options),
        deadline_(options.timeout.count() == 0 ? state_.timeout : options.timeout),
        round_(state_.traces.fetch_add(1)) {}

  void run(const std::filesystem::path& path) {
    const bool alone = state_.size == 1 || !state_.is_distributed;
    nanoseconds zero = ticks(base::Timeline::origin());
    if (!alone) {
      wait_for_all_ranks();
      remove_previous_round();
      const nanoseconds offset = align();
      zero = agree_on_zero(ticks(base::Timeline::origin()) + offset) - offset;
    }
    const Clock::time_point local{std::chrono::duration_cast<Clock::duration>(zero - options_.clock_ahead)};
    const std::string events = base::Timeline::events(state_.rank, base::concat("rank ", state_.rank), local);
    if (state_.rank == 0) {
      write(path, events, alone);
    } else if (!alone) {
      send(events);
      wait_for(0, key("result"));
      const std::string error = state_.store->get_to_str(key("result"));
      leave_key(state_, key("result"), deadline_);
      if (error != "written")
        throw SystemError("comm.write_trace", "rank 0 could not write the trace: " + error);
    }
  }

  base::Deadline deadline() const { return deadline_; }
  std::string describe() const {
    return base::concat("write_trace ", round_, " of group '", state_.name, "' (rank ", state_.rank, "/",
                        state_.size, ", ",
                        std::chrono::duration_cast<milliseconds>(deadline_.elapsed()).count(), " ms)");
  }

 private:
  nanoseconds ticks(Clock::time_point time) const {
    return std::chrono::duration_cast<nanoseconds>(time.time_since_epoch()) + options_.clock_ahead;
  }
  milliseconds left() const { return milliseconds(std::max(1, deadline_.remaining_ms())); }
  std::string key(const char* what, int rank = -1, int number = -1) const {
    return key_of(round_, what, rank, number);
  }
  static std::string key_of(std::int64_t round, const char* what, int rank = -1, int number = -1) {
    return base::concat("trace/", round, "/", what, rank < 0 ? "" : "/" + std::to_string(rank),
                        number < 0 ? "" : "/" + std::to_string(number));
  }
  // For what `rank` leaves there.
  void wait_for(int rank, const std::string& name) const {
    if (store_adapter_of(state_).wait({name}, deadline_)) return;
    const int stuck = rank == 0 ? served_rank() : rank;
    throw TimeoutError("comm.write_trace",
                       base::concat(describe(), ": rank ", stuck, " has come and does not continue: ",
                                    stuck == rank ? "it has not written " + name
                                                  : "rank 0 takes its events, or stands still itself"));
  }

  // Rank 0 takes the ranks one after the other: who waits for it asks for whom it waits.
  void set_served_rank(int rank) const { state_.store->set(key("serves"), std::to_string(rank)); }
  int served_rank() const {
    if (!state_.store->check({key("serves")})) return 0;
    const int rank = std::stoi(state_.store->get_to_str(key("serves")));
    return rank == state_.rank ? 0 : rank;
  }

  // Each rank leaves there which clock it reads.
  void wait_for_all_ranks() {
    state_.store->set(
        key("clock", state_.rank),
        clock_id() + (options_.clock_ahead.count() == 0 ? "" : base::concat(" rank ", state_.rank)));
    StoreAdapter kv_store = store_adapter_of(state_);
    const std::vector<int> missing = base::missing_ranks(kv_store, key("clock"), state_.size, deadline_);
    if (missing.empty()) return;
    throw TimeoutError("comm.write_trace", base::concat(describe(), ": ", base::format_list("rank", missing),
                                                        missing.size() == 1 ? " has" : " have", " not come"));
  }

  // After wait_for_all_ranks() all ranks have left the previous round, so no rank reads its keys any more.
  void remove_previous_round() const {
    if (round_ == 0) return;
    StoreAdapter kv_store = store_adapter_of(state_);
    for (const char* what : {"clock", "begin"}) kv_store.remove(key_of(round_ - 1, what, state_.rank));
    if (state_.rank != 0) return;
    for (const char* what : {"serves", "result"}) kv_store.remove(key_of(round_ - 1, what));
    base::StoreBarrier(kv_store, key_of(round_ - 1, "result") + "/departed", state_.rank, state_.size)
        .remove();
  }

  // What to add to this rank's clock to have rank 0's.
  nanoseconds align() {
    const std::string first = state_.store->get_to_str(key("clock", 0));
    if (state_.rank != 0) {
      return state_.store->get_to_str(key("clock", state_.rank)) == first ? nanoseconds(0) : measure();
    }
    for (int rank = 1; rank < state_.size; ++rank) {
      if (state_.store->get_to_str(key("clock", rank)) == first) continue;
      set_served_rank(rank);
      for (int i = 0; i < kRounds; ++i) {
        wait_for(rank, key("ping", rank, i));
        state_.store->set(key("pong", rank, i), std::to_string(ticks(Clock::now()).count()));
      }
    }
    set_served_rank(0);
    return nanoseconds(0);
  }

  nanoseconds measure() {
    nanoseconds best = nanoseconds::max(), offset(0);
    for (int i = 0; i < kRounds; ++i) {
      const nanoseconds asked = ticks(Clock::now());
      state_.store->set(key("ping", state_.rank, i), "1");
      wait_for(0, key("pong", state_.rank, i));
      const std::string pong = state_.store->get_to_str(key("pong", state_.rank, i));
      const nanoseconds answered = ticks(Clock::now());
      // The first waits until rank 0 has come to this rank; the shortest is believed.
      if (answered - asked >= best) continue;
      best = answered - asked;
      // Cristian's algorithm (1989): the answer is taken for the time in the middle of the round trip.
      offset = nanoseconds(std::stoll(pong)) - (asked + best / 2);
    }
    for (int i = 0; i < kRounds; ++i) {
      state_.store->deleteKey(key("ping", state_.rank, i));
      state_.store->deleteKey(key("pong", state_.rank, i));
    }
    return offset;
  }

  // The earliest of all ranks' beginnings, so that no event has a negative time.
  nanoseconds agree_on_zero(nanoseconds own_begin) {
    state_.store->set(key("begin", state_.rank), std::to_string(own_begin.count()));
    nanoseconds zero = own_begin;
    for (int rank = 0; rank < state_.size; ++rank) {
      wait_for(rank, key("begin", rank));
      zero = std::min(zero, nanoseconds(std::stoll(state_.store->get_to_str(key("begin", rank)))));
    }
    return zero;
  }

  void send(const std::string& text) {
    at::Tensor head = at::empty({2}, at::kLong);
    auto* numbers = head.mutable_data_ptr<std::int64_t>();
    numbers[0] = static_cast<std::int64_t>(text.size());
    numbers[1] = static_cast<std::int64_t>(base::Timeline::dropped());
    group_.send(head.to(state_.device), 0, kTag, {left()}).wait();
    for (std::int64_t at = 0; at < numbers[0]; at += kPieceBytes) {
      const std::int64_t size = std::min(kPieceBytes, numbers[0] - at);
      at::Tensor piece = at::empty({size}, at::kByte);
      std::memcpy(piece.mutable_data_ptr(), text.data() + at, static_cast<std::size_t>(size));
      group_.send(piece.to(state_.device), 0, kTag, {left()}).wait();
    }
  }

  // Calls `take` with each piece of `rank`'s events; returns how many events it dropped.
  template <typename Take>
  std::int64_t receive(int rank, const Take& take) {
    at::Tensor head = at::empty({2}, at::TensorOptions(at::kLong).device(state_.device));
    group_.recv(head, rank, kTag, {left()}).wait();
    const at::Tensor numbers = head.cpu();
    const std::int64_t total = numbers.const_data_ptr<std::int64_t>()[0];
    for (std::int64_t at = 0; at < total; at += kPieceBytes) {
      at::Tensor piece =
          at::empty({std::min(kPieceBytes, total - at)}, at::TensorOptions(at::kByte).device(state_.device));
      group_.recv(piece, rank, kTag, {left()}).wait();
      const at::Tensor bytes = piece.cpu();
      take(std::string_view(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()));
    }
    return numbers.const_data_ptr<std::int64_t>()[1];
  }

  // Takes what the others send even when the file cannot be written: they wait for it.
  void write(const std::filesystem::path& path, const std::string& events, bool alone) {
    std::optional<base::AtomicFile> file;
    std::exception_ptr failure;
    std::string words = "written";
    const auto attempt = [&](const auto& action) {
      if (failure) return;
      try {
        action();
      } catch (const std::exception& error) {
        failure = std::current_exception();
        words = error.what();
      }
    };
    attempt([&] {
      file.emplace(path);
      file->write(R"({"displayTimeUnit":"ms","traceEvents":[)");
      file->write(events);
    });
    auto dropped = static_cast<std::int64_t>(base::Timeline::dropped());
    for (int rank = 1; !alone && rank < state_.size; ++rank) {
      attempt([&] { file->write(","); });
      set_served_rank(rank);
      dropped += receive(rank, [&](std::string_view piece) { attempt([&] { file->write(piece); }); });
    }
    if (!alone) set_served_rank(0);
    attempt([&] {
      file->write(base::concat("\n],\"otherData\":{\"dropped_events\":", dropped, "}}\n"));
      file->commit();
    });
    if (!alone) {
      state_.store->set(key("result"), words);
      leave_key(state_, key("result"), deadline_);
    }
    if (failure) std::rethrow_exception(failure);
  }

  static constexpr int kTag = 0x7ace;

  const Group& group_;
  GroupState& state_;
  const TraceOptions options_;
  const base::Deadline deadline_;
  const std::int64_t round_;
};

}  // namespace

void write_trace(const Group& group, const std::filesystem::path& path, TraceOptions options) {
  if (!group) throw UsageError("comm.write_trace", "this process is not in the group");
  Tracing tracing(group, options);
  try {
    const StoreDeadline until(tracing.deadline().later(kLastAnswerTime));
    tracing.run(path);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw_translated(error, "comm.write_trace", tracing.describe());
  }
}

}  // namespace cohort::comm
