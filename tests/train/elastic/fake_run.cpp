// A generation begins when each process that lives waits to enter. Transfers are rendezvous in memory: each
// process posts what it sends, and gets what all have posted. A process that has posted everything may die,
// and the others then finish a step that its successor has to copy.
#include "tests/train/elastic/fake_run.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"

namespace cohort::test {

/// What processes of a generation have posted, by number of the transfer.
struct FakeRun::Round {
  std::uint64_t number = 0;
  int size = 0;
  bool has_ended = false;
  struct Piece {
    at::Tensor bytes;
    std::vector<std::int64_t> sizes;  // of what goes to each process; empty: all goes to all
  };
  std::map<int, std::vector<std::optional<Piece>>> posted;
};

struct FakeRun::Process {
  bool is_alive = true, waits = false, has_finished = false;
  bool is_changing = false;  // its state is of no use
  std::uint64_t committed = 0, generation = 0;
  int points = 0;
  elastic::StateAccess state;
  std::optional<elastic::StateSnapshot> incoming;
  elastic::GenerationInfo info;
};

class FakeExchange : public parallel::SliceExchange {
 public:
  FakeExchange(FakeRun& run, std::shared_ptr<FakeRun::Round> round, int id, int rank)
      : run_(run), round_(std::move(round)), id_(id), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return round_->size; }

  Transfer all_to_all(at::Tensor output, const at::Tensor& input,
                      const std::vector<std::int64_t>& output_bytes,
                      const std::vector<std::int64_t>& input_bytes) override {
    return transfer(input, input_bytes, [this, output, output_bytes](const auto& pieces) {
      auto* to = static_cast<std::uint8_t*>(output.mutable_data_ptr());
      for (int from = 0; from < round_->size; ++from) {
        const auto& piece = *pieces[static_cast<std::size_t>(from)];
        if (piece.sizes.empty()) throw std::logic_error("processes make different transfers");
        std::int64_t begin = 0;
        for (int k = 0; k < rank_; ++k) begin += piece.sizes[static_cast<std::size_t>(k)];
        const std::int64_t size = piece.sizes[static_cast<std::size_t>(rank_)];
        if (size != output_bytes[static_cast<std::size_t>(from)])
          throw std::logic_error("sizes of pieces differ");
        std::memcpy(to, static_cast<const std::uint8_t*>(piece.bytes.const_data_ptr()) + begin,
                    static_cast<std::size_t>(size));
        to += size;
      }
    });
  }
  Transfer all_gather(at::Tensor output, const at::Tensor& input) override {
    return transfer(input, {}, [output](const auto& pieces) {
      auto* to = static_cast<std::uint8_t*>(output.mutable_data_ptr());
      for (const auto& piece : pieces) {
        if (piece->bytes.nbytes() * pieces.size() != output.nbytes())
          throw std::logic_error("sizes of pieces differ");
        std::memcpy(to, piece->bytes.const_data_ptr(), piece->bytes.nbytes());
        to += piece->bytes.nbytes();
      }
    });
  }
  Transfer broadcast(at::Tensor bytes) override {
    return transfer(bytes, {}, [bytes](const auto& pieces) {
      if (pieces.front()->bytes.nbytes() != bytes.nbytes()) throw std::logic_error("sizes of pieces differ");
      std::memcpy(bytes.mutable_data_ptr(), pieces.front()->bytes.const_data_ptr(), bytes.nbytes());
    });
  }

 private:
  using Pieces = std::vector<std::optional<FakeRun::Round::Piece>>;

  Transfer transfer(const at::Tensor& input, std::vector<std::int64_t> sizes,
                    std::function<void(const Pieces&)> take) {
    run_.reach_point(id_, true);
    const std::lock_guard lock(run_.mutex_);
    run_.check_may_wait(id_);
    throw_if_ended();
    const int number = next_++;
    Pieces& pieces = round_->posted[number];
    pieces.resize(static_cast<std::size_t>(round_->size));
    pieces[static_cast<std::size_t>(rank_)] = {input.clone(), std::move(sizes)};
    run_.changed_.notify_all();
    return [this, number, take = std::move(take), self = round_] {
      run_.reach_point(id_, true);
      std::unique_lock lock(run_.mutex_);
      run_.check_may_wait(id_);
      const auto is_there = [&] {
        return std::ranges::all_of(self->posted[number], [](const auto& p) { return p.has_value(); });
      };
      run_.wait(lock, [&] { return is_there() || self->has_ended; }, "a transfer");
      if (!is_there()) throw_if_ended();
      take(self->posted[number]);
    };
  }
  void throw_if_ended() const {
    if (round_->has_ended) throw elastic::GenerationEnded("test.fake", "a process is lost");
  }

  FakeRun& run_;
  const std::shared_ptr<FakeRun::Round> round_;
  const int id_, rank_;
  int next_ = 0;
};

class FakeSession : public elastic::Session {
 public:
  FakeSession(FakeRun& run, int id) : run_(run), id_(id) {}

  int virtual_ranks() const override { return run_.virtual_ranks_; }
  void set_state(elastic::StateAccess state) override {
    const std::lock_guard lock(run_.mutex_);
    process().state = std::move(state);
  }
  elastic::GenerationInfo enter(std::uint64_t committed_steps) override {
    run_.reach_point(id_, false);
    std::unique_lock lock(run_.mutex_);
    wait_for_generation(lock, committed_steps);
    if (run_.has_ended_) throw elastic::RunEnded(true, "", run_.stop_signal_);
    return take_place(lock);
  }
  bool must_enter() const override {
    run_.reach_point(id_, false);
    const std::lock_guard lock(run_.mutex_);
    return run_.round_ == nullptr || run_.round_->has_ended || run_.has_joiner();
  }
  bool must_leave() const override {
    const std::lock_guard lock(run_.mutex_);
    return run_.round_ == nullptr || run_.round_->has_ended;
  }
  std::shared_ptr<parallel::SliceExchange> exchange() const override { return exchange_; }
  void begin_changes() override {
    {
      const std::lock_guard lock(run_.mutex_);
      process().is_changing = true;
    }
    run_.reach_point(id_, false);
  }
  void commit(std::uint64_t steps) override {
    run_.reach_point(id_, false);
    {
      const std::lock_guard lock(run_.mutex_);
      if (steps < process().committed) throw std::logic_error("a step is committed twice");
      process().committed = steps;
      process().is_changing = false;
    }
    run_.reach_point(id_, false);
  }
  void set_stop_signal(int signal) override {
    const std::lock_guard lock(run_.mutex_);
    run_.stop_signal_ = signal;
  }
  elastic::GenerationInfo finish() override {
    run_.reach_point(id_, false);
    std::unique_lock lock(run_.mutex_);
    process().has_finished = true;
    while (true) {
      wait_for_generation(lock, process().committed);
      if (run_.has_ended_) return process().info;
      take_place(lock);
    }
  }

 private:
  FakeRun::Process& process() const { return *run_.processes_[static_cast<std::size_t>(id_)]; }

  void wait_for_generation(std::unique_lock<std::mutex>& lock, std::uint64_t committed) {
    const std::uint64_t before = process().generation;
    process().committed = committed;
    process().waits = true;
    if (run_.round_ != nullptr && process().generation == run_.round_->number && !process().has_finished) {
      run_.end_generation();  // no step can be made without this process
    }
    if (run_.all_wait()) run_.form_generation();
    run_.wait(lock, [&] { return run_.has_ended_ || process().generation > before; }, "a generation");
    process().waits = false;
  }
  elastic::GenerationInfo take_place(std::unique_lock<std::mutex>& lock) {
    exchange_ = std::make_shared<FakeExchange>(run_, run_.round_, id_, process().info.process);
    elastic::GenerationInfo info = process().info;
    if (const auto incoming = std::exchange(process().incoming, std::nullopt)) {
      lock.unlock();
      process().state.load(*incoming);
      lock.lock();
    }
    return info;
  }

  FakeRun& run_;
  const int id_;
  std::shared_ptr<FakeExchange> exchange_;
};

FakeRun::FakeRun(int virtual_ranks, FakeFaults faults, Body body)
    : origin_(base::random_word()),
      virtual_ranks_(virtual_ranks),
      faults_(std::move(faults)),
      body_(std::move(body)) {}

FakeRun::~FakeRun() {
  for (std::thread& thread : threads_) thread.join();
}

void FakeRun::wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ready,
                   const std::string& what) {
  if (!changed_.wait_for(lock, std::chrono::seconds(60), [&] { return error_ != nullptr || ready(); })) {
    throw TimeoutError("test.fake", what + " did not come");
  }
  if (error_ != nullptr && !ready()) throw FakeDeath("another process has failed");
}

// With the lock held. A process that was started and has not come yet is waited for: it enters soon.
bool FakeRun::all_wait() const {
  return std::ranges::all_of(processes_, [](const auto& p) { return !p->is_alive || p->waits; });
}

bool FakeRun::has_joiner() const {
  return std::ranges::any_of(
      processes_, [&](const auto& p) { return p->is_alive && p->waits && p->generation != generation_; });
}

void FakeRun::end_generation() {
  if (round_ != nullptr) round_->has_ended = true;
  changed_.notify_all();
}

void FakeRun::form_generation() {
  std::vector<int> members;
  bool has_finished = true;
  for (int id = 0; id < static_cast<int>(processes_.size()); ++id) {
    if (!processes_[static_cast<std::size_t>(id)]->is_alive) continue;
    members.push_back(id);
    has_finished &= processes_[static_cast<std::size_t>(id)]->has_finished;
  }
  if (members.empty()) return;
  if (has_finished) {
    has_ended_ = true;
    changed_.notify_all();
    return;
  }
  round_ = std::make_shared<Round>();
  round_->number = ++generation_;
  round_->size = static_cast<int>(members.size());
  const auto process_of = [&](int id) -> Process& { return *processes_[static_cast<std::size_t>(id)]; };
  std::vector<int> holders;
  std::ranges::copy_if(members, std::back_inserter(holders),
                       [&](int id) { return !process_of(id).is_changing; });
  if (holders.empty()) throw std::logic_error("no process has a state");
  const int holder = *std::ranges::max_element(
      holders, [&](int a, int b) { return process_of(a).committed < process_of(b).committed; });
  const std::uint64_t newest = process_of(holder).committed;
  std::optional<elastic::StateSnapshot> state;
  for (int rank = 0; rank < round_->size; ++rank) {
    Process& process = process_of(members[static_cast<std::size_t>(rank)]);
    // Before the first step all have the state of one process.
    const bool copies = process.is_changing || process.committed < newest || (newest == 0 && rank > 0);
    if (copies) {
      if (!state) {
        state = process_of(holder).state.save();
        for (at::Tensor& tensor : state->tensors) tensor = tensor.clone();
      }
      process.incoming = elastic::StateSnapshot{state->text, {}};
      for (const at::Tensor& tensor : state->tensors) process.incoming->tensors.push_back(tensor.clone());
    }
    process.is_changing = false;
    process.committed = newest;
    process.generation = generation_;
    process.waits = false;  // though its thread may wake up later
    process.info = {.generation = generation_,
                    .process = rank,
                    .num_processes = round_->size,
                    .steps = newest,
                    .has_copied = copies,
                    .origin = origin_};
  }
  changed_.notify_all();
}

// With the lock held. Whoever waits may have to go back to the state that it is changing.
void FakeRun::check_may_wait(int id) const {
  if (processes_[static_cast<std::size_t>(id)]->is_changing) {
    throw std::logic_error("a wait inside a transaction");
  }
}

void FakeRun::note_death(int id) {
  processes_[static_cast<std::size_t>(id)]->is_alive = false;
  ++deaths_;
  end_generation();
  if (all_wait()) form_generation();
}

void FakeRun::reach_point(int id, bool may_end) {
  const std::lock_guard lock(mutex_);
  if (error_ != nullptr) throw FakeDeath("another process has failed");
  const int point = processes_[static_cast<std::size_t>(id)]->points++;
  const FakeFault fault = faults_ ? faults_(id, point) : FakeFault::kNone;
  const auto is_alive = [](const auto& process) { return process->is_alive; };
  const auto alive = std::ranges::count_if(processes_, is_alive);
  if (fault == FakeFault::kDie || fault == FakeFault::kVanish) {
    if (fault == FakeFault::kDie || alive == 1) start();
    note_death(id);
    throw FakeDeath("killed");
  }
  if (fault == FakeFault::kJoin && alive < virtual_ranks_ && !has_ended_) start();
  if (fault == FakeFault::kEnd && may_end) {
    end_generation();
    throw elastic::GenerationEnded("test.fake", "a link is lost");
  }
}

// With the lock held.
void FakeRun::start() {
  const int id = static_cast<int>(processes_.size());
  processes_.push_back(std::make_unique<Process>());
  ++running_;
  threads_.emplace_back([this, id] {
    const auto session = std::make_shared<FakeSession>(*this, id);
    try {
      body_(id, session);
    } catch (const FakeDeath&) {
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_ && !has_ended_) error_ = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    processes_[static_cast<std::size_t>(id)]->is_alive = false;
    --running_;
    changed_.notify_all();
  });
}

void FakeRun::run(int count) {
  std::unique_lock lock(mutex_);
  for (int i = 0; i < count; ++i) start();
  changed_.wait(lock, [&] { return running_ == 0; });
  if (error_) std::rethrow_exception(error_);
}

int FakeRun::points(int process_id) const {
  const std::lock_guard lock(mutex_);
  return processes_.at(static_cast<std::size_t>(process_id))->points;
}
std::uint64_t FakeRun::generations() const {
  const std::lock_guard lock(mutex_);
  return generation_;
}
int FakeRun::deaths() const {
  const std::lock_guard lock(mutex_);
  return deaths_;
}

}  // namespace cohort::test
