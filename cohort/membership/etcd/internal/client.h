#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "cohort/membership/etcd/internal/gateway.h"
#include "cohort/membership/etcd/internal/http_client.h"
#include "cohort/membership/etcd/internal/problems.h"
#include "cohort/membership/etcd_options.h"
#include "cohort/membership/record_store.h"

namespace cohort::membership::etcd {

using Time = std::chrono::steady_clock::time_point;

/// Whether a text is the record of a run that has ended.
using HasEnded = bool (*)(const std::string& text);

/// Keeps a record in etcd: what is asked for goes out as requests, and again to another endpoint where it
/// fails; what comes back is told to the listener. Threads: one at a time.
class Client {
 public:
  /// Ownership: refers to `http`.
  Client(EtcdOptions options, HasEnded has_ended, HttpClient& http, RecordStore::Listener listener);

  void read();
  void swap(std::uint64_t expected, std::string text, Time now);
  void on_event(const HttpEvent& event, Time now);
  /// Begins and ends what is due; returns when there will be more to do.
  Time advance(Time now);

 private:
  // What is asked for: at most one request at a time.
  struct Operation {
    const char* what = "";      // "to read"
    std::uint64_t id = 0;       // of the request; 0: none is under way
    std::string endpoint = {};  // of the request
    Time next = {};             // not before then
    int num_failures = 0;       // one after the other
    bool is_beta = false;       // the request's path was the older one
    std::uint64_t told = 0;     // revision of the record when the request was sent
  };
  struct Swap {
    std::uint64_t expected = 0;
    std::string text;
    Time deadline;
    bool needs_lease = false;
    std::optional<std::uint64_t> lease;
    int num_sent = 0;
  };

  const std::string& endpoint() const { return options_.endpoints[endpoint_]; }
  void start(Operation& operation, const char* path, std::string body);
  void stop(Operation& operation);
  void start_login(Time now);
  void advance_swap(Time now);
  void on_success(Operation& operation, const std::string& text, Time now);
  void on_read(const ReadAnswer& answer, Time now);
  void on_swap(const SwapAnswer& answer);
  void on_watch(const std::string& line, Time now);
  void note_success(Operation& operation);
  void check_cluster(const Header& header);
  void fail(Operation& operation, const Rejection& rejection, Time now);
  void leave_endpoint(Time now);
  EtcdKeyValue newest(const EtcdKeyValue& entry, std::uint64_t told);
  void notify(StoreAnswer::Type type, const EtcdKeyValue& entry);

  const EtcdOptions options_;
  const HasEnded has_ended_;
  const std::string key_;
  HttpClient& http_;
  const RecordStore::Listener listener_;
  Problems problems_;

  std::size_t endpoint_ = 0;
  std::uint64_t cluster_ = 0;
  std::string token_;
  bool needs_login_;
  bool is_beta_ = false;  // etcd 3.3 has the same gateway below another path
  Operation login_{"to log in"}, read_{"to read"}, check_{"to read"}, lease_{"to write"}, put_{"to write"},
      watch_{"to watch"};
  bool wants_read_ = true, is_asked_ = false;
  std::optional<Swap> swap_;
  std::uint64_t watch_from_ = 0;  // revision of etcd; 0: to be read first
  Time next_check_;
  EtcdKeyValue told_;  // the newest that the listener knows
};

}  // namespace cohort::membership::etcd
