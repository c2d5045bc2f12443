#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "cohort/comm/backends/shm/internal/collectives.h"
#include "cohort/comm/backends/shm/internal/engine.h"
#include "tests/support/stores/map_store.h"

/// Ranks of the backend shm as threads, without LibTorch: what is tested here runs under sanitizers.
namespace cohort::comm::shm {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::MapStore;

/// One rank: what it begins, and waits for.
class Rank {
 public:
  Rank(KeyValueStore& kv_store, int rank, int size, milliseconds timeout = seconds(20))
      : timeout_(timeout),
        engine_(std::make_unique<Communicator>(kv_store, rank, size, base::Deadline(timeout))) {}
  int rank() { return engine_.ranks().rank(); }
  int size() { return engine_.ranks().size(); }
  Communicator& ranks() { return engine_.ranks(); }
  Engine& engine() { return engine_; }

  std::shared_ptr<Operation> begin(std::function<Task()> make, const char* call = "call",
                                   bool is_message = false, milliseconds timeout = milliseconds(0)) {
    auto operation = std::make_shared<Operation>(base::Deadline(timeout.count() > 0 ? timeout : timeout_));
    operation->call = call;
    operation->number = calls_++;
    operation->make = std::move(make);
    operation->is_message = is_message;
    engine_.begin(operation);
    return operation;
  }
  void wait(const std::shared_ptr<Operation>& operation) {
    engine_.wait(*operation, base::Deadline::never());
  }
  void run(std::function<Task()> make, const char* call = "call") { wait(begin(std::move(make), call)); }

  template <typename T>
  void sum(std::vector<T>& list, Dtype dtype, Op op = Op::kSum) {
    sum(list.data(), list.size(), dtype, op);
  }
  template <typename T>
  void sum(T* data, std::size_t numel, Dtype dtype, Op op = Op::kSum) {
    run([&] { return all_reduce(ranks(), reinterpret_cast<std::byte*>(data), numel, dtype, op); },
        "all_reduce");
  }
  std::shared_ptr<Operation> send(int to, std::vector<int>& data, int tag) {
    return begin([this, to, &data, tag] { return engine_.messages().send(to, span(data), tag); }, "send",
                 true);
  }
  std::shared_ptr<Operation> recv(int from, std::vector<int>& data, int tag, int* source) {
    return begin(
        [this, from, &data, tag, source] { return engine_.messages().recv(from, span(data), tag, source); },
        "recv", true);
  }
  template <typename T>
  static Span span(std::vector<T>& data) {
    return {reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(T)};
  }

 private:
  milliseconds timeout_;
  std::uint64_t calls_ = 0;
  Engine engine_;
};

/// Throws what the lowest rank threw.
inline void run_threads(int size, const std::function<void(Rank&)>& body,
                        milliseconds timeout = seconds(20)) {
  MapStore kv_store;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Rank this_rank(kv_store, rank, size, timeout);
        body(this_rank);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace cohort::comm::shm
