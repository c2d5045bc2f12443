#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <functional>
#include <list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "cohort/base/files/fd.h"

/// HTTP on the loopback, as little of it as tests need.
namespace cohort::test {

namespace http_detail {

inline sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

inline bool send_all(int socket, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(sent));
  }
  return true;
}

inline bool receive_more(int socket, std::string& text) {
  std::string buffer(64 * 1024, '\0');
  const ssize_t size = ::recv(socket, buffer.data(), buffer.size(), 0);
  if (size > 0) text.append(buffer, 0, static_cast<std::size_t>(size));
  return size > 0;
}

}  // namespace http_detail

/// Returns the body of the answer to a POST. Throws where there is none within 20 s.
inline std::string http_post(std::uint16_t port, const std::string& path, const std::string& body,
                             const std::string& token = "") {
  const base::Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval patience{20, 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  const sockaddr_in address = http_detail::loopback(port);
  std::string answer;
  // HTTP/1.0: the connection ends with the answer.
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
      http_detail::send_all(socket.get(),
                            "POST " + path + " HTTP/1.0\r\nContent-Length: " + std::to_string(body.size()) +
                                (token.empty() ? "" : "\r\nAuthorization: " + token) + "\r\n\r\n" + body)) {
    while (http_detail::receive_more(socket.get(), answer)) {
    }
  }
  const std::size_t end = answer.find("\r\n\r\n");
  if (end == std::string::npos) throw std::runtime_error("no answer to " + path);
  return answer.substr(end + 4);
}

/// Serves POSTs, each connection on a thread.
class HttpServer {
 public:
  struct Request {
    std::string path, headers, body;
  };
  /// The connection that a request came by.
  class Connection {
   public:
    Connection(int socket, const std::atomic<bool>& is_stopping)
        : socket_(socket), is_stopping_(is_stopping) {}
    bool send(std::string_view bytes) { return http_detail::send_all(socket_, bytes); }
    bool answer(int status, std::string_view body) {
      return send("HTTP/1.1 " + std::to_string(status) +
                  " X\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + std::string(body));
    }
    bool begin_stream() { return send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"); }
    bool send_chunk(std::string_view bytes) {
      std::string size(20, '\0');
      size.resize(static_cast<std::size_t>(std::snprintf(size.data(), size.size(), "%zx\r\n", bytes.size())));
      return send(size + std::string(bytes) + "\r\n");
    }
    void close() { ::shutdown(socket_, SHUT_RDWR); }
    /// Whether the other side still has it open, and this server lives.
    bool is_open() const {
      char byte = 0;
      const ssize_t size = ::recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
      return !is_stopping_ && size != 0;
    }

   private:
    const int socket_;
    const std::atomic<bool>& is_stopping_;
  };
  using Handler = std::function<void(const Request&, Connection&)>;

  /// The handler is called by many threads.
  explicit HttpServer(Handler handler)
      : handler_(std::move(handler)), listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = http_detail::loopback(0);
    socklen_t size = sizeof address;
    if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        ::listen(listener_.get(), 64) != 0 ||
        ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      throw std::runtime_error("no free port");
    }
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { accept_all(); });
  }
  ~HttpServer() {
    is_stopping_ = true;
    ::shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
    for (auto& [socket, thread] : connections_) ::shutdown(socket.get(), SHUT_RDWR);
    for (auto& [socket, thread] : connections_) thread.join();
  }
  std::uint16_t port() const { return port_; }
  std::string endpoint() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  void accept_all() {
    while (!is_stopping_) {
      base::Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!socket.is_open()) continue;
      const int number = socket.get();
      connections_.emplace_back(std::move(socket), std::thread([this, number] { serve(number); }));
    }
  }

  void serve(int socket) {
    Connection connection(socket, is_stopping_);
    for (std::string text; !is_stopping_;) {
      const std::size_t end = text.find("\r\n\r\n");
      const std::size_t size = end == std::string::npos ? 0 : end + 4 + content_length(text.substr(0, end));
      if (end == std::string::npos || text.size() < size) {
        if (!http_detail::receive_more(socket, text)) break;
        continue;
      }
      Request request{text.substr(5, text.find(' ', 5) - 5), text.substr(0, end),
                      text.substr(end + 4, size - end - 4)};
      text.erase(0, size);
      handler_(request, connection);
    }
    connection.close();
  }

  static std::size_t content_length(std::string headers) {
    std::transform(headers.begin(), headers.end(), headers.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    const std::size_t at = headers.find("content-length:");
    return at == std::string::npos ? 0 : std::stoul(headers.substr(at + 15));
  }

  const Handler handler_;
  const base::Fd listener_;
  std::uint16_t port_ = 0;
  std::atomic<bool> is_stopping_{false};
  std::list<std::pair<base::Fd, std::thread>> connections_;  // of the thread, until it has ended
  std::thread thread_;
};

}  // namespace cohort::test
