// Two processes and the wire between them, on a clock that jumps to the next event. A seed decides delays,
// sizes of pieces, broken links that each side sees late or never, stopped processes, deaths, clocks, and
// whether payloads go by handle. What must hold whatever happens:
//   a message, or what took its place, arrives at most once, and in order within its channel, with the bytes
//     that were sent;
//   if both live and the wire holds in the end, every message arrives, and then nothing is left: no byte, no
//     credit, no block of a heap, no timer in the past;
//   a session ends only for a death, a goodbye or a silence that there was.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <vector>

#include "cohort/net/internal/session.h"

namespace cohort::net {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

struct Faults {
  bool cuts = false, stops = false, deaths = false, goodbye = false, long_silence = false;
};

struct Sent {
  std::uint32_t channel;
  std::uint64_t number;  // within the channel
  std::size_t size;
};

// The bytes of a message, from `at` on: those of a long table, from a place that depends on its number.
const std::byte* bytes_of(std::uint64_t number, std::size_t at) {
  static const std::vector<std::byte> table = [] {
    std::mt19937_64 random(1);
    std::vector<std::byte> bytes(1'000'000);
    for (std::size_t i = 0; i < bytes.size(); i += 8) {
      const std::uint64_t word = random();
      std::memcpy(&bytes[i], &word, 8);
    }
    return bytes;
  }();
  return table.data() + number * 131 % 90'000 + at;
}

class Simulation {
 public:
  Simulation(std::uint64_t seed, Faults faults) : random_(seed), faults_(faults) {
    options_.window = pick(2) == 0 ? 64 << 20 : 300'000 + pick(700'000);
    constexpr std::size_t kSpeeds[] = {5, 50, 5'000};
    bytes_per_us_ = kSpeeds[pick(3)];
    for (int side = 0; side < 2; ++side) {
      Side& end = sides_[side];
      end.clock_rate = 1.0 + (static_cast<double>(pick(201)) - 100) * 1e-6;
      end.session.emplace(side == 0 ? Role::kCaller : Role::kListener, options_, allocate_aligned, nullptr,
                          local(side));
      wake(side, now_);
    }
    if (pick(3) == 0) make_heaps();
    const int num_messages = 1 + static_cast<int>(pick(60));
    const std::uint64_t spread = pick(2) == 0 ? 400'000 : 2'000;  // over time, or at once
    for (int i = 0; i < num_messages; ++i) {
      at(now_ + microseconds(5'000 + pick(spread)), [this] { send(static_cast<int>(pick(2))); });
    }
    const auto schedule = [&](bool has, int most, const std::function<void()>& what) {
      if (!has) return;
      for (int i = 1 + static_cast<int>(pick(most)); i > 0; --i) at(now_ + microseconds(pick(500'000)), what);
    };
    schedule(faults.cuts, 6, [this] { cut(); });
    schedule(faults.stops, 3, [this] { stop(static_cast<int>(pick(2))); });
    schedule(faults.deaths, 1, [this] { die(static_cast<int>(pick(2))); });
    schedule(faults.goodbye, 1, [this] {
      const int side = static_cast<int>(pick(2));
      sides_[side].has_left = true;
      sides_[side].session->leave();
      wake(side, now_);
    });
    if (faults.long_silence) {
      at(now_ + microseconds(pick(300'000)), [this] {
        is_wire_dead_ = true;
        cut();
      });
    }
  }

  // Returns what does not hold, or "".
  std::string run() {
    const Time end = now_ + std::chrono::seconds(30);
    int at_one_time = 0;
    while (!events_.empty() && error_.empty()) {
      const Event event = events_.top();
      if (event.time > end) break;
      at_one_time = event.time == now_ ? at_one_time + 1 : 0;
      if (at_one_time > 20'000) return "time does not pass: a timer lies in the past";
      now_ = event.time;
      events_.pop();
      event.run();
    }
    if (error_.empty()) check_end();
    return error_;
  }

 private:
  struct Event {
    Time time;
    std::uint64_t order;
    std::function<void()> run;
    bool operator<(const Event& other) const {
      return std::tie(time, order) > std::tie(other.time, other.order);
    }
  };
  struct Link {
    bool is_broken = false;
    bool is_open[2] = {true, true};  // as each side sees it
    std::size_t in_flight[2] = {0, 0};
    Time last_arrival[2] = {};
  };
  struct Side {
    std::optional<Session> session;
    double clock_rate = 1;
    bool is_alive = true, has_left = false;
    Time stopped_until = {}, armed = Time::max();
    std::shared_ptr<Link> link;
    std::map<std::uint32_t, std::vector<Sent>> sent;  // by channel
    std::map<std::uint32_t, std::size_t> delivered;   // of the other side's, by channel
    std::vector<std::shared_ptr<void>> credits;
    std::shared_ptr<SharedHeap> heap;  // null: no payload goes by handle
    std::shared_ptr<const Handles> handles;
  };

  void make_heaps() {
    for (Side& end : sides_) end.heap = std::make_shared<SharedHeap>(1 << 20, 64 << 20);
    for (int side = 0; side < 2; ++side) {
      const base::Fd fd(::dup(sides_[1 - side].heap->descriptor()));
      sides_[side].handles = std::make_shared<Handles>(sides_[side].heap, MappedHeap::map(fd),
                                                       std::make_shared<Holder>(::getpid(), ""));
    }
  }

  std::uint64_t pick(std::uint64_t below) { return random_() % below; }
  void at(Time time, std::function<void()> run) { events_.push({time, next_order_++, std::move(run)}); }
  void fail(const std::string& what) {
    if (error_.empty()) error_ = what;
  }
  // The time on a side's own clock, and back.
  Time local(int side) const {
    return Time() + nanoseconds(static_cast<std::int64_t>(
                        static_cast<double>(now_.time_since_epoch().count()) * sides_[side].clock_rate));
  }
  Time global(int side, Time local) const {
    if (local == Time::min()) return now_;
    if (local == Time::max()) return local;
    return Time() +
           nanoseconds(static_cast<std::int64_t>(static_cast<double>(local.time_since_epoch().count()) /
                                                 sides_[side].clock_rate)) +
           nanoseconds(1000);
  }
  bool is_running(int side) const { return sides_[side].is_alive && now_ >= sides_[side].stopped_until; }

  void wake(int side, Time time) {
    Side& end = sides_[side];
    time = std::max({time, now_, end.stopped_until});
    if (time >= end.armed) return;
    end.armed = time;
    at(time, [this, side, time] {
      if (sides_[side].armed == time) pump(side);
    });
  }

  void send(int side) {
    Side& end = sides_[side];
    if (!is_running(side) || end.has_left || end.session->ended()) return;
    const auto channel = static_cast<std::uint32_t>(pick(3)) + (pick(3) == 0 ? kAnswerChannels : 0);
    const std::uint64_t number = end.sent[channel].size();
    const std::size_t kind = pick(10);
    const std::size_t size = kind < 6 ? pick(2'000) : kind < 9 ? pick(100'000) : pick(900'000);
    Message message;
    message.channel = channel;
    message.header = std::to_string(number);
    for (std::size_t left = size; left > 0 && message.payloads.size() < 4;) {
      const std::size_t part = message.payloads.size() == 3 ? left : 1 + pick(left);
      const bool moves = end.heap && pick(4) != 0;
      const std::shared_ptr<std::byte> memory = moves ? end.heap->allocate(part) : allocate_aligned(part);
      std::memcpy(memory.get(), bytes_of(number, size - left), part);
      message.payloads.push_back({memory, {memory.get(), part}, moves});
      left -= part;
    }
    end.sent[channel].push_back({channel, number, size});
    const std::uint64_t ticket = end.session->send(std::move(message));
    pump(side);
    if (pick(4) != 0) return;
    at(now_ + microseconds(pick(20'000)),
       [this, side, ticket, channel, number] { replace(side, ticket, channel, number); });
  }

  // Nobody waits for the message any more.
  void replace(int side, std::uint64_t ticket, std::uint32_t channel, std::uint64_t number) {
    if (!is_running(side)) return;
    Message empty;
    empty.channel = channel;
    empty.header = std::to_string(number);
    if (!sides_[side].session->replace(ticket, empty)) return;
    sides_[side].sent[channel][number].size = 0;
    pump(side);
  }

  void pump(int side) {
    Side& end = sides_[side];
    end.armed = Time::max();
    if (!is_running(side)) {
      if (end.is_alive) wake(side, end.stopped_until);
      return;
    }
    Session& session = *end.session;
    if (local(side) >= session.next_time()) session.tick(local(side));
    note_end(side);
    if (session.wants_link(local(side))) {
      session.start_link();
      at(now_ + microseconds(20 + pick(2'000)), [this] { connect(); });
    }
    write(side);
    if (!session.ended()) wake(side, global(side, session.next_time()));
  }

  void write(int side) {
    Side& end = sides_[side];
    const std::shared_ptr<Link> link = end.link;
    if (!link || !link->is_open[side]) return;
    while (end.session->wants_to_write() && link->in_flight[side] < 300'000) {
      std::vector<iovec> parts;
      end.session->gather(parts);
      std::string bytes;
      for (const iovec& part : parts) bytes.append(static_cast<const char*>(part.iov_base), part.iov_len);
      if (bytes.empty()) return fail("there are bytes to write, and none came");
      const std::size_t size = std::min<std::size_t>(bytes.size(), 1 + pick(pick(3) == 0 ? 100 : 400'000));
      end.session->written(size, local(side));
      bytes.resize(size);
      link->in_flight[side] += size;
      const Time begin =
          std::max(link->last_arrival[side], now_ + microseconds(5 + pick(pick(10) == 0 ? 20'000 : 200)));
      const Time arrival = begin + microseconds(size / bytes_per_us_);
      link->last_arrival[side] = arrival;
      at(arrival, [this, side, link, bytes] { arrive(1 - side, link, bytes); });
    }
    if (end.session->has_left() && !is_goodbye_sent_[side]) is_goodbye_sent_[side] = true;
  }

  void arrive(int side, const std::shared_ptr<Link>& link, const std::string& bytes) {
    link->in_flight[1 - side] -= bytes.size();
    if (link->is_broken || !link->is_open[side]) return;
    Side& end = sides_[side];
    if (!end.is_alive) return;
    if (!is_running(side)) {
      link->in_flight[1 - side] += bytes.size();
      return at(end.stopped_until, [this, side, link, bytes] { arrive(side, link, bytes); });
    }
    std::vector<Message> messages;
    std::span<const std::byte> left = std::as_bytes(std::span(bytes));
    while (!left.empty() && !end.session->ended()) {
      const std::span<std::byte> target = end.session->target();
      if (!target.empty() && pick(2) == 0) {
        const std::size_t size = std::min(target.size(), left.size());
        std::memcpy(target.data(), left.data(), size);
        end.session->filled(size, local(side), messages);
        left = left.subspan(size);
      } else {
        const std::size_t size = std::min<std::size_t>(left.size(), 1 + pick(70'000));
        end.session->consume(left.first(size), local(side), messages);
        left = left.subspan(size);
      }
    }
    for (Message& message : messages) deliver(side, message);
    if (is_running(1 - side)) write(1 - side);  // there is room again
    pump(side);
  }

  void deliver(int side, Message& message) {
    Side& end = sides_[side];
    const auto& sent = sides_[1 - side].sent[message.channel];
    const std::size_t expected = end.delivered[message.channel]++;
    if (expected >= sent.size()) return fail("a message came that was never sent");
    if (message.header != std::to_string(expected)) {
      return fail("message " + message.header + " of channel " + std::to_string(message.channel) +
                  " came in place of " + std::to_string(expected));
    }
    std::size_t position = 0;
    for (const Payload& payload : message.payloads) {
      if (std::memcmp(payload.bytes.data(), bytes_of(expected, position), payload.bytes.size()) != 0) {
        return fail("a byte is another one");
      }
      position += payload.bytes.size();
    }
    if (position != sent[expected].size) return fail("a message has another size");
    // It is used now or later.
    const std::shared_ptr<void> credit = std::move(message.credit);
    if (pick(2) == 0) return;
    at(now_ + microseconds(pick(30'000)), [this, side, credit = credit]() mutable {
      credit.reset();
      if (is_running(side)) {
        sides_[side].session->tick(local(side));
        pump(side);
      }
    });
  }

  // The caller's try. A process that is stopped accepts too, as its kernel does, but says nothing.
  void connect() {
    if (!sides_[0].is_alive || sides_[0].session->ended() || sides_[0].session->is_up()) return;
    Session& caller = *sides_[0].session;
    if (!sides_[1].is_alive || sides_[1].session->ended() || has_gone(1)) {
      caller.connect_failed(!sides_[1].is_alive || has_gone(1), local(0));
      if (sides_[1].is_alive && sides_[1].session->ended())
        caller.end(DownKind::kSilent, "has given this process up");
      return pump(0);
    }
    if (is_wire_dead_ || !is_running(0) || !is_running(1)) {
      if (!is_running(0)) return at(sides_[0].stopped_until, [this] { connect(); });
      return at(now_ + milliseconds(1000), [this] {
        if (sides_[0].session->is_up()) return;
        sides_[0].session->connect_failed(false, local(0));
        pump(0);
      });
    }
    if (pick(8) == 0) {  // the handshake breaks off
      caller.connect_failed(false, local(0));
      return pump(0);
    }
    const auto link = std::make_shared<Link>();
    for (int side = 0; side < 2; ++side) {
      if (sides_[side].link) sides_[side].link->is_open[side] = false;
      if (sides_[side].session->is_up()) sides_[side].session->link_down(local(side));
    }
    const std::uint64_t of_caller = caller.received(), of_listener = sides_[1].session->received();
    sides_[0].link = sides_[1].link = link;
    const bool has_handles = pick(4) != 0;  // there may be no memory for a shared link
    const std::shared_ptr<const Handles> none;
    caller.link_up(of_listener, local(0), has_handles ? sides_[0].handles : none);
    sides_[1].session->link_up(of_caller, local(1), has_handles ? sides_[1].handles : none);
    pump(1);
    pump(0);
  }
  bool has_gone(int side) const { return is_goodbye_sent_[side]; }

  void cut() {
    const std::shared_ptr<Link> link = sides_[pick(2)].link;
    if (!link || link->is_broken) return;
    link->is_broken = true;
    for (int side = 0; side < 2; ++side) {
      if (pick(5) == 0 && !faults_.long_silence) continue;  // this side hears nothing of it
      at(now_ + microseconds(pick(50'000)), [this, side, link] { see_break(side, link); });
    }
  }
  void see_break(int side, const std::shared_ptr<Link>& link) {
    if (!sides_[side].is_alive || !link->is_open[side]) return;
    if (!is_running(side))
      return at(sides_[side].stopped_until, [this, side, link] { see_break(side, link); });
    link->is_open[side] = false;
    if (sides_[side].link == link) sides_[side].session->link_down(local(side));
    pump(side);
  }

  void stop(int side) {
    if (!is_running(side)) return;
    const auto time = milliseconds(pick(2) == 0 ? pick(500) : pick(6'000));
    most_stopped_[side] = std::max(most_stopped_[side], time);
    sides_[side].stopped_until = now_ + time;
    sides_[side].armed = Time::max();
    wake(side, sides_[side].stopped_until);
  }

  void die(int side) {
    if (!sides_[side].is_alive) return;
    sides_[side].is_alive = false;
    const Time died = now_;
    const bool is_same_host = pick(2) == 0;
    if (is_same_host) {
      at(now_ + microseconds(pick(8'000)), [this, side] { see_death(1 - side); });
    } else if (sides_[side].link) {
      sides_[side].link->is_broken = true;
      at(now_ + microseconds(pick(1'000)),
         [this, side, link = sides_[side].link] { see_break(1 - side, link); });
    }
    at(died + milliseconds(10), [this, side, is_same_host] {
      if (is_same_host && is_running(1 - side) && !faults_.stops && !sides_[1 - side].session->ended()) {
        fail("a death on the same host was not seen within 10 ms");
      }
    });
  }
  void see_death(int side) {
    if (!sides_[side].is_alive) return;
    if (!is_running(side)) return at(sides_[side].stopped_until, [this, side] { see_death(side); });
    sides_[side].session->end(DownKind::kDied, "died");
    note_end(side);
  }

  void note_end(int side) {
    const Side& end = sides_[side];
    if (!end.session->ended()) return;
    const Side& other = sides_[1 - side];
    const End& how = *end.session->ended();
    const bool was_silent =
        faults_.long_silence || faults_.cuts || most_stopped_[1 - side] >= milliseconds(1'500);
    switch (how.kind) {
      case DownKind::kDied:
        if (other.is_alive && !has_gone(1 - side)) fail("a death was seen of a process that lives");
        break;
      case DownKind::kLeft:
        if (!other.has_left) fail("a goodbye was heard that was never said");
        break;
      case DownKind::kSilent:
        if (other.is_alive && !was_silent && !other.session->ended() && !has_gone(1 - side)) {
          fail("a peer that was never silent was given up: " + how.text);
        }
        break;
      case DownKind::kFailed:
        fail("a session failed: " + how.text);
    }
  }

  void check_end() {
    const Side &a = sides_[0], &b = sides_[1];
    for (int side = 0; side < 2; ++side) {
      const Side &end = sides_[side], &other = sides_[1 - side];
      // A caller that never had a link tries until nobody waits for it.
      if (!end.is_alive || (side == 0 && end.session->num_links() == 0)) continue;
      if ((!other.is_alive || has_gone(1 - side)) && !end.session->ended() && !has_gone(side)) {
        return fail("after 30 s a peer that is gone was not missed");
      }
    }
    if (!a.is_alive || !b.is_alive || a.session->ended() || b.session->ended() || a.has_left || b.has_left)
      return;
    for (int side = 0; side < 2; ++side) {
      for (const auto& [channel, sent] : sides_[side].sent) {
        const auto found = sides_[1 - side].delivered.find(channel);
        const std::size_t came = found == sides_[1 - side].delivered.end() ? 0 : found->second;
        if (came != sent.size()) {
          return fail("of " + std::to_string(sent.size()) + " messages of channel " +
                      std::to_string(channel) + " only " + std::to_string(came) + " came");
        }
      }
      const Outbox& box = sides_[side].session->outbox();
      if (box.num_queued() != 0 || box.num_kept() != 0) return fail("messages are kept that have arrived");
      if (box.bytes_on_the_way() != 0) return fail("bytes count that have been used");
      if (sides_[side].heap && sides_[side].heap->bytes_in_use() != 0) return fail("blocks are in use");
    }
  }

  std::mt19937_64 random_;
  const Faults faults_;
  SessionOptions options_;
  std::size_t bytes_per_us_ = 1;
  Time now_ = Time() + std::chrono::hours(1);
  std::uint64_t next_order_ = 0;
  std::priority_queue<Event> events_;
  Side sides_[2];
  bool is_wire_dead_ = false;
  bool is_goodbye_sent_[2] = {false, false};
  milliseconds most_stopped_[2] = {milliseconds(0), milliseconds(0)};
  std::string error_;
};

void run_seeds(const char* kind, Faults faults) {
  const char* const given = std::getenv("COHORT_NET_SEEDS");
  const std::uint64_t num_seeds = given == nullptr ? 300 : std::strtoull(given, nullptr, 10);
  const char* const first = std::getenv("COHORT_NET_FIRST_SEED");
  const std::uint64_t begin = first == nullptr ? 0 : std::strtoull(first, nullptr, 10);
  for (std::uint64_t seed = begin; seed < begin + num_seeds; ++seed) {
    const std::string error = Simulation(seed, faults).run();
    ASSERT_EQ(error, "") << kind << ": COHORT_NET_FIRST_SEED=" << seed << " COHORT_NET_SEEDS=1";
  }
}

TEST(SimulationTest, AWireThatHolds) {
  run_seeds("a wire that holds", {});
}
TEST(SimulationTest, LinksBreak) {
  run_seeds("links break", {.cuts = true});
}
TEST(SimulationTest, ProcessesStop) {
  run_seeds("processes stop", {.stops = true});
}
TEST(SimulationTest, LinksBreakAndProcessesStop) {
  run_seeds("breaks and stops", {.cuts = true, .stops = true});
}
TEST(SimulationTest, ProcessesDie) {
  run_seeds("deaths", {.cuts = true, .deaths = true});
}
TEST(SimulationTest, ProcessesLeave) {
  run_seeds("goodbyes", {.cuts = true, .goodbye = true});
}
TEST(SimulationTest, TheWireDies) {
  run_seeds("a dead wire", {.long_silence = true});
}
TEST(SimulationTest, AllOfIt) {
  run_seeds("all", {.cuts = true, .stops = true, .deaths = true, .goodbye = true});
}

}  // namespace
}  // namespace cohort::net
