#pragma once

#include <curl/curl.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/threads/deadline.h"

namespace cohort::membership::etcd {

struct HttpOptions {
  bool is_tls = false;
  std::filesystem::path authorities, certificate, key;  ///< as EtcdOptions has them
};

/// A POST of JSON.
struct HttpRequest {
  std::string endpoint;  ///< "host:port"
  std::string path;      ///< "/v3/kv/range"
  std::string body;
  std::string token;                     ///< of the login; empty: none
  std::chrono::milliseconds timeout{0};  ///< of the whole request; of a stream: until it is connected
  bool is_stream = false;                ///< its answer is told line by line, and does not end
  /// A connection that was used before may have ended, and curl sends a request again over another one, also
  /// where it was read.
  bool may_repeat = true;
};

/// What came of a request.
struct HttpEvent {
  std::uint64_t id = 0;   ///< of the request
  bool is_line = false;   ///< a line of a stream; else the end of the request, the last that is told of it
  int status = 0;         ///< 0: there was no answer
  std::string text = {};  ///< the line, or the answer; of a status 0: why there is none
};

/// Requests that are under way at the same time. Threads: one at a time, but wake_up().
class HttpClient {
 public:
  /// Throws: SystemError where libcurl cannot be used.
  explicit HttpClient(HttpOptions options);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  /// Begins a request; returns its id, from 1.
  std::uint64_t start(const HttpRequest& request);
  /// Nothing more is told of the request. 0 is none.
  void cancel(std::uint64_t id);
  /// Waits until something came, wake_up() or the deadline.
  std::vector<HttpEvent> wait(base::Deadline deadline);
  /// Ends a wait(), or the next one. Threads: any.
  void wake_up();

 private:
  struct Transfer;

  void set_tls(CURL* easy) const;
  void finish(CURLMsg& message);

  const HttpOptions options_;
  CURLM* const multi_;
  std::map<std::uint64_t, std::unique_ptr<Transfer>> transfers_;
  std::uint64_t last_id_ = 0;
  std::vector<HttpEvent> events_;
};

}  // namespace cohort::membership::etcd
