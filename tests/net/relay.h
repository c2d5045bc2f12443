#pragma once

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "cohort/net/internal/socket.h"

namespace cohort::test {

/// Passes bytes on between who connects to it and `target`, and can cut all connections, or swallow what
/// comes.
class Relay {
 public:
  explicit Relay(const std::string& target, const std::string& listen = "127.0.0.1:0") : target_(target) {
    listener_ = net::listen_at(net::resolve(listen), address_);
    thread_ = std::thread([this] { run(); });
  }
  ~Relay() {
    stops_ = true;
    thread_.join();
  }
  const std::string& address() const { return address_; }
  /// Each connection ends, in the middle of whatever it is in.
  void cut() { ++cuts_; }
  /// The same once so many more bytes have come, of both directions together.
  void cut_after(std::int64_t num_bytes) { left_ = num_bytes; }
  /// From now on connections take bytes and pass none on.
  void fall_silent() { is_silent_ = true; }
  int num_connections() const { return connections_; }
  /// Whether these bytes have passed, in one read of a connection, so far.
  bool has_passed(const std::string& bytes) {
    const std::lock_guard lock(mutex_);
    return passed_.find(bytes) != std::string::npos;
  }

 private:
  void run() {
    std::map<int, std::pair<base::Fd, int>> ends;  // by descriptor: itself, and the other end
    int cuts = 0;
    std::string buffer(64 * 1024, '\0');
    while (!stops_) {
      if (cuts != cuts_) {
        cuts = cuts_;
        ends.clear();
      }
      std::vector<pollfd> files{{listener_.get(), POLLIN, 0}};
      for (const auto& [fd, end] : ends) files.push_back({fd, POLLIN, 0});
      ::poll(files.data(), files.size(), 1);
      for (const pollfd& file : files) {
        if (file.revents == 0) continue;
        if (file.fd == listener_.get()) {
          base::Fd in = net::accept_from(listener_.get()), out = net::start_connect(net::resolve(target_));
          if (!in.is_open() || !out.is_open()) continue;
          pollfd ready{out.get(), POLLOUT, 0};
          ::poll(&ready, 1, 1000);
          ++connections_;
          const int a = in.get(), b = out.get();
          ends[a] = {std::move(in), b};
          ends[b] = {std::move(out), a};
          continue;
        }
        const auto end = ends.find(file.fd);
        if (end == ends.end()) continue;
        const int other = end->second.second;
        const ssize_t size = ::read(file.fd, buffer.data(), buffer.size());
        bool is_over = size <= 0;
        if (size > 0) {
          const std::lock_guard lock(mutex_);
          passed_.append(buffer, 0,
                         std::min(static_cast<std::size_t>(size), kMaxPassedBytes - passed_.size()));
        }
        if (const std::int64_t left = left_; left > 0 && size > 0) {
          left_ = left - size;
          if (left <= size) ++cuts_;
          is_over = left <= size;  // what was read is lost
        }
        for (ssize_t sent = 0; !is_over && !is_silent_ && sent < size;) {
          const ssize_t part =
              ::send(other, buffer.data() + sent, static_cast<std::size_t>(size - sent), MSG_NOSIGNAL);
          if (part > 0) {
            sent += part;
          } else if (errno == EAGAIN && cuts == cuts_ && !stops_) {
            pollfd ready{other, POLLOUT, 0};
            ::poll(&ready, 1, 1);
          } else {
            is_over = true;
            break;
          }
        }
        if (is_over) {
          ends.erase(other);
          ends.erase(file.fd);
        }
      }
    }
  }

  static constexpr std::size_t kMaxPassedBytes = 1 << 20;
  std::mutex mutex_;
  std::string passed_;  // the first bytes, of all connections in turn

  const std::string target_;
  std::string address_;
  base::Fd listener_;
  std::atomic<bool> stops_{false}, is_silent_{false};
  std::atomic<int> cuts_{0}, connections_{0};
  std::atomic<std::int64_t> left_{0};  // until the next cut, where above 0
  std::thread thread_;
};

}  // namespace cohort::test
