#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <optional>
#include <string>
#include <utility>

#include "cohort/base/files/fd.h"
#include "cohort/base/secret.h"
#include "cohort/net/internal/handshake.h"
#include "cohort/net/internal/socket.h"

namespace cohort::test {

/// Of a caller that is nobody in particular.
inline net::Hello hello_of(const std::string& name) {
  net::Hello hello;
  hello.name = name;
  hello.incarnation = base::random_word();
  hello.session = 1;
  hello.window = 1 << 20;
  return hello;
}

/// A caller that says what a test wants, and then nothing. With a port in the hello it says its end of the
/// connection too.
class RawCaller {
 public:
  RawCaller(const net::SocketAddress& address, net::Hello hello)
      : socket_(net::start_connect(address)),
        handshake_(net::Role::kCaller, std::nullopt, base::random_word()) {
    exchange();
    if (hello.port != 0) hello.address = net::own_end(socket_.get()).text;
    handshake_.set_hello(hello);
    exchange();
  }
  bool is_done() const { return handshake_.is_done(); }
  /// The connection ends, and its descriptor stays.
  void cut() { ::shutdown(socket_.get(), SHUT_RDWR); }

 private:
  void exchange() {
    pollfd ready{socket_.get(), POLLOUT, 0};
    ASSERT_EQ(::poll(&ready, 1, 20'000), 1);
    const std::string bytes = handshake_.take_output();
    ASSERT_EQ(::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    std::string answer(net::kMaxHelloBytes, '\0');
    ready.events = POLLIN;
    ASSERT_EQ(::poll(&ready, 1, 20'000), 1);
    answer.resize(static_cast<std::size_t>(::recv(socket_.get(), answer.data(), answer.size(), 0)));
    handshake_.feed(answer);
  }

  base::Fd socket_;
  net::Handshake handshake_;
};

}  // namespace cohort::test
