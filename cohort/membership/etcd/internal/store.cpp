// A Client on a thread of its own. Calls of the store leave a command and wake the thread up, so none of them
// waits.
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/serial_queue.h"
#include "cohort/base/threads/wait.h"
#include "cohort/membership/etcd/internal/client.h"

namespace cohort::membership::etcd {
namespace {

constexpr std::chrono::milliseconds kStopTime(2'000);

// The thread owns it too: one that is left behind still uses it.
class Loop {
 public:
  Loop(EtcdOptions options, HasEnded has_ended)
      : options_(std::move(options)),
        has_ended_(has_ended),
        http_({options_.is_tls, options_.authorities, options_.certificate, options_.key}) {}

  using Command = std::function<void(Client&, Time)>;

  void post(Command command) {
    {
      const std::lock_guard lock(mutex_);
      commands_.push_back(std::move(command));
    }
    http_.wake_up();
  }
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    http_.wake_up();
  }

  void run(RecordStore::Listener listener) {
    Client client(options_, has_ended_, http_, std::move(listener));
    for (std::deque<Command> commands; take(commands);) {
      try {
        for (const Command& command : commands) command(client, Time::clock::now());
        const Time now = Time::clock::now();
        const base::Deadline deadline(client.advance(now) - now);
        for (const HttpEvent& event : http_.wait(deadline)) client.on_event(event, Time::clock::now());
      } catch (const Error& error) {  // libcurl has no memory, or no descriptor
        base::warn_once("membership.etcd", base::message_of(error));
        base::sleep(std::chrono::milliseconds(100), base::Deadline(kStopTime));
      }
    }
  }

 private:
  // False when the thread is to end.
  bool take(std::deque<Command>& commands) {
    const std::lock_guard lock(mutex_);
    commands = std::exchange(commands_, {});
    return !is_stopping_;
  }

  const EtcdOptions options_;
  const HasEnded has_ended_;
  HttpClient http_;
  std::mutex mutex_;
  std::deque<Command> commands_;
  bool is_stopping_ = false;
};

class EtcdStore : public RecordStore {
 public:
  EtcdStore(EtcdOptions options, HasEnded has_ended)
      : loop_(std::make_shared<Loop>(std::move(options), has_ended)) {}
  ~EtcdStore() override {
    loop_->stop();
    thread_.stop(kStopTime);
  }

  void watch(Listener listener) override {
    thread_.submit("etcd", [loop = loop_, listener = std::move(listener)] { loop->run(listener); });
  }
  void read() override {
    loop_->post([](Client& client, Time) { client.read(); });
  }
  void compare_and_swap(std::uint64_t expected, std::string text) override {
    loop_->post(
        [expected, text = std::move(text)](Client& client, Time now) { client.swap(expected, text, now); });
  }

 private:
  const std::shared_ptr<Loop> loop_;
  base::SerialQueue thread_{{.name = "etcd", .in_timeline = false}};
};

}  // namespace
}  // namespace cohort::membership::etcd

// Found by load.cpp.
extern "C" void cohort_make_etcd_store(const cohort::membership::EtcdOptions& options,
                                       cohort::membership::etcd::HasEnded has_ended,
                                       std::shared_ptr<cohort::membership::RecordStore>& store) {
  store = std::make_shared<cohort::membership::etcd::EtcdStore>(options, has_ended);
}
