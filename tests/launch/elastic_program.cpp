// A rank of an elastic run without tensors: processes of a generation make steps together, by words in its
// store. It ends when FOLDER has a file "go". It notes what it does in files there, and what it finds in its
// region, where it leaves its own number. While there is a file "hang_RANK" a rank does not begin; with
// "slow_copy" it gets a state that it lacks in 40 parts of 100 ms, and with "no_copy" never. With "stopped"
// it ends as one that a signal has stopped. With "stop_RANK" it stops once it has answered the order of
// another generation. By its argument it fails in each generation; "rank 0 fails in a generation": the other
// ranks of its node ignore SIGTERM.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "cohort/launch/error_file.h"
#include "cohort/membership/net_store.h"
#include "cohort/membership/rank_link.h"

namespace {

using namespace cohort;
using base::Deadline;
using std::chrono::milliseconds;
using std::chrono::seconds;

std::filesystem::path folder() {
  return std::getenv("FOLDER");
}

void pause(milliseconds time) {
  static_cast<void>(base::poll_until([] { return false; }, Deadline(time)));
}

void note(const std::string& name, const std::string& text) {
  // Ranks of two nodes may note the same thing at once.
  const std::string own = base::concat(name, ".partial_", ::getpid());
  const std::filesystem::path path = folder() / name, partial = folder() / own;
  std::ofstream(partial) << text;
  std::filesystem::rename(partial, path);
}

class Rank {
 public:
  Rank(membership::RankLink link, bool fails) : link_(std::move(link)), fails_(fails) {}

  int run() {
    note("pid_" + local_, std::to_string(::getpid()));
    while (std::filesystem::exists(folder() / ("hang_" + local_))) pause(milliseconds(20));
    status_.is_ready = true;
    say();
    while (!order_.has_ended) {
      read(Deadline(milliseconds(20)));
      const std::uint64_t number = order_.generation.number;
      if (!order_.process && status_.entered != 0 && status_.left < number) {
        status_.left = number;
        say();
      } else if (order_.process && number > status_.entered && enter()) {
        make_steps();
      }
    }
    if (order_.has_succeeded) note(base::concat("end_", ::getpid()), "");
    return order_.has_succeeded ? (status_.stop_signal == 0 ? 0 : 128 + status_.stop_signal) : 1;
  }

 private:
  void say() { link_.send(to_text(status_), Deadline(seconds(20))); }
  void read(Deadline deadline) {
    while (const auto text = link_.receive(deadline)) {
      if (base::Fd file = link_.take_file(); file.is_open()) note_region(std::move(file));
      order_ = membership::parse_rank_order(*text);
      deadline = Deadline(milliseconds(0));
      status_.heard = order_.number;
      say();
      if (order_.generation.number > status_.entered &&
          std::filesystem::remove(folder() / ("stop_" + local_))) {
        ::raise(SIGSTOP);
      }
    }
  }
  void note_region(base::Fd file) {
    pid_t before = 0;
    const pid_t own = ::getpid();
    const bool has_any = ::pread(file.get(), &before, sizeof before, 0) == sizeof before;
    if (::pwrite(file.get(), &own, sizeof own, 0) != sizeof own) throw std::runtime_error("pwrite");
    note(base::concat("region_", own), has_any ? std::to_string(before) : "empty");
  }
  std::string key(const std::string& what, int process) const {
    return base::concat("generation/", status_.entered, "/", what, "/", process);
  }
  // Whether all processes of the generation have set their words; false where it is over.
  bool exchange_words(const std::string& what, const std::string& word) {
    try {
      return exchange_in_store(what, word);
    } catch (const membership::StaleGeneration&) {
      return false;
    }
  }
  bool exchange_in_store(const std::string& what, const std::string& word) {
    store_->set(key(what, *order_.process), word);
    std::vector<std::string> keys;
    for (int p = 0; p < order_.generation.num_processes(); ++p) keys.push_back(key(what, p));
    const Deadline soon(milliseconds(100));
    while (!store_->wait(keys, Deadline(milliseconds(5)))) {
      read(Deadline(milliseconds(0)));
      if (is_generation_over()) return false;
      if (soon.expired() && !std::exchange(status_.is_waiting, true)) say();
    }
    if (std::exchange(status_.is_waiting, false)) say();
    words_ = store_->get_all(keys);
    return true;
  }
  bool is_generation_over() const {
    return order_.has_ended || !order_.process || order_.generation.number != status_.entered;
  }

  bool enter() {
    status_.entered = order_.generation.number;
    store_ = std::make_unique<membership::NetStore>(membership::NetStoreOptions{
        .address = order_.generation.store, .secret = base::Secret::of_process()});
    say();
    std::printf("enters generation %d\n", static_cast<int>(status_.entered));
    std::fflush(stdout);
    if (fails_) throw std::runtime_error("a rank that cannot take part");
    note(
        base::concat("in_", status_.entered, "_", *order_.process, "_of_", order_.generation.num_processes()),
        std::to_string(::getpid()));
    if (!exchange_words("committed", std::to_string(status_.committed_steps))) return false;
    // Whoever lacks the newest state has it from another one.
    std::uint64_t newest = 0, oldest = std::stoull(words_.front());
    for (const std::string& word : words_) {
      newest = std::max<std::uint64_t>(newest, std::stoull(word));
      oldest = std::min<std::uint64_t>(oldest, std::stoull(word));
    }
    if (oldest < newest && !copy_state()) return false;
    status_.committed_steps = newest;
    status_.recovered = status_.entered;
    say();
    return true;
  }

  // On both sides.
  bool copy_state() {
    while (std::filesystem::exists(folder() / "no_copy")) {
      read(Deadline(milliseconds(20)));
      if (is_generation_over()) return false;
    }
    const int parts = std::filesystem::exists(folder() / "slow_copy") ? 40 : 0;
    for (int part = 0; part < parts; ++part) {
      pause(milliseconds(100));
      read(Deadline(milliseconds(0)));
      if (is_generation_over()) return false;
      ++status_.state_bytes;
      say();
    }
    return true;
  }

  void make_steps() {
    while (!is_generation_over()) {
      const bool is_last = std::filesystem::exists(folder() / "go");
      if (!exchange_words(base::concat("step ", status_.committed_steps), is_last ? "last" : "")) return;
      ++status_.committed_steps;
      status_.stepped = status_.entered;
      status_.is_finished = std::ranges::count(words_, "last") > 0;
      if (status_.is_finished && std::filesystem::exists(folder() / "stopped")) status_.stop_signal = SIGTERM;
      say();
      if (std::exchange(stepped_, status_.entered) != status_.entered)
        note(base::concat("stepped_", status_.entered, "_", local_), "");
      while (status_.is_finished && !is_generation_over()) read(Deadline(milliseconds(20)));
      read(Deadline(milliseconds(1)));
    }
  }

  membership::RankLink link_;
  const bool fails_;  // in each generation
  membership::RankOrder order_;
  membership::RankStatus status_;
  std::uint64_t stepped_ = 0;  // the last generation in which it has made a step
  std::unique_ptr<membership::NetStore> store_;
  std::vector<std::string> words_;
  const std::string local_ = std::getenv("LOCAL_RANK");
};

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string argument = argc > 1 ? argv[1] : "";
    const bool is_rank_0 = std::string(std::getenv("LOCAL_RANK")) == "0";
    const bool fails_alone = argument == "rank 0 fails in a generation";
    const bool fails_later = argument == "fail in a generation" || (fails_alone && is_rank_0);
    if (!argument.empty() && !fails_later && !fails_alone) throw std::runtime_error(argument);
    if (fails_alone && !is_rank_0) ::signal(SIGTERM, SIG_IGN);
    auto link = membership::RankLink::of_process();
    if (!link) throw std::runtime_error("no agent has started this program");
    return Rank(*std::move(link), fails_later).run();
  } catch (const std::exception& error) {
    launch::record_error(error.what());
    std::fprintf(stderr, "%s\n", error.what());
    return 5;
  }
}
