#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cohort/base/threads/serial_queue.h"
#include "cohort/base/threads/thread_pool.h"
#include "cohort/membership/internal/member_events.h"
#include "cohort/membership/internal/member_protocol.h"
#include "cohort/membership/member_options.h"

namespace cohort::membership::member_detail {

/// Drives a MemberProtocol: by a node, a store, a clock and a thread, which keeps it alive.
class MemberLoop : public std::enable_shared_from_this<MemberLoop> {
 public:
  explicit MemberLoop(MemberOptions options);

  /// Once, after the constructor.
  void start();
  /// Ends without a goodbye.
  void stop();

  void set_status(MemberStatus status);
  void note_alive() { alive_at_ = Time::clock::now(); }
  MemberView view() const;
  bool wait_for_change(std::uint64_t seen, base::Deadline deadline) const;
  const std::string& incarnation() const { return node_->incarnation(); }
  const std::string& address() const { return address_; }
  void close(base::Deadline deadline);

 private:
  void run();
  void handle(const Event& event, Time now, MemberProtocol::Effects& effects);
  void apply(const MemberProtocol::Effects& effects);
  void send(const std::string& address, const AgentMessage& message);
  void connect(const std::string& address);
  void publish(const MemberProtocol::Effects& effects);
  void log_record(const RendezvousRecord& record);
  void end_thread();
  bool does_program_hang(Time now);

  const MemberOptions options_;
  std::shared_ptr<RecordStore> store_;
  const std::shared_ptr<EventQueue> events_;
  std::shared_ptr<net::Node> node_;
  std::string address_;
  std::atomic<bool> is_stopped_{false};
  std::atomic<Time> alive_at_{Time::clock::now()};

  // Of the thread.
  std::optional<MemberProtocol> protocol_;
  std::map<std::string, std::shared_ptr<net::Peer>> peers_;     // by address
  std::map<std::string, std::vector<std::string>> to_be_sent_;  // by address, while it is connected to
  std::string sent_text_;                                       // of the last record that was sent
  std::uint64_t sent_revision_ = 0;
  std::uint64_t logged_generation_ = 0;
  std::string last_failure_;  // to connect
  bool was_hanging_ = false;
  std::deque<Event> held_;  // that came while the program hung
  std::string published_failure_;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  MemberView view_;
  bool do_all_know_ = false;

  base::ThreadPool connectors_;
  base::SerialQueue thread_;
};

}  // namespace cohort::membership::member_detail
