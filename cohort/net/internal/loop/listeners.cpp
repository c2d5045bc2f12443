// asio says that a listener is readable, and then all callers are accepted. Without a descriptor for the
// next one the oldest connection in its handshake goes, also one that this node began; if there is none, the
// listener pauses, as it stays readable and would take a core.
#include "cohort/net/internal/loop/listeners.h"

#include <poll.h>

#include <asio/steady_timer.hpp>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/wait.h"
#include "cohort/net/internal/socket.h"

namespace cohort::net::node_detail {
namespace {

constexpr std::size_t kMaxStrangers = 64;  // connections that have not proved that they know the secret
constexpr int kMaxPerTurn = 64;
constexpr std::string_view kAllOfIpv4 = "0.0.0.0:";
constexpr std::chrono::milliseconds kPauseWithoutDescriptors(100);

// At IPv4's addresses nobody would hear who has only an IPv6 address to come to. Where no name server says
// which families lead to this host, it listens at both: the name may be known when others look it up.
base::Fd listen_for(const SocketAddress& address, const std::string& host, std::string& bound) {
  const bool is_at_all = address.text.starts_with(kAllOfIpv4) && !host.empty();
  const std::optional<bool> needs_ipv6 = is_at_all ? has_ipv6_alone(host) : false;
  if (needs_ipv6 == false) return listen_at(address, bound, host);
  try {
    return listen_at(resolve(base::concat("[::]:", address.text.substr(kAllOfIpv4.size()))), bound, host);
  } catch (const Error&) {
    if (needs_ipv6.has_value()) throw;
    return listen_at(address, bound, host);  // this host has no IPv6
  }
}

}  // namespace

std::string Listeners::listen(const std::string& text, const std::string& host) {
  const std::string name = parse_host(host);
  const SocketAddress address = resolve(text);
  if (!core_.options.secret && !address.is_unix() && !address.is_loopback()) {
    throw UsageError("net.listen",
                     base::concat("strangers can reach ", text, ", and this process has no secret"),
                     "COHORT_SECRET_FILE, or a loopback address");
  }
  std::string bound;
  base::Fd fd = listen_for(address, name, bound);
  const std::lock_guard lock(core_.lock.mutex);
  if (core_.lock.is_closing) throw UsageError("net.listen", "this node has been closed");
  core_.listened.push_back(own_end(fd.get()));
  listeners_.push_back(std::make_shared<asio::posix::stream_descriptor>(core_.io, fd.release()));
  wait_to_accept(listeners_.back());
  return bound;
}

void Listeners::stop() {
  // What waits for callers holds the listener too: it would stay open until the node is destroyed.
  for (const Listener& listener : listeners_) {
    asio::error_code ignored;
    listener->close(ignored);
  }
  listeners_.clear();
  core_.listened.clear();
}

void Listeners::wait_to_accept(const Listener& listener) {
  listener->async_wait(
      asio::posix::stream_descriptor::wait_read, [this, listener](const asio::error_code& error) {
        if (error) return;
        core_.hand_over.locked([&] {
          if (accept_all(listener->native_handle())) return wait_to_accept(listener);
          // The listener stays readable: asked again at once, it would take a core.
          const auto pause = std::make_shared<asio::steady_timer>(core_.io, kPauseWithoutDescriptors);
          pause->async_wait([this, pause, listener](const asio::error_code& ended) {
            if (!ended) core_.hand_over.locked([&] { wait_to_accept(listener); });
          });
        });
      });
}

// False where a connection waits for which there is no descriptor.
bool Listeners::accept_all(int listener) {
  const Time now = Time::clock::now();
  for (int i = 0; i < kMaxPerTurn; ++i) {  // others wait for the mutex
    base::Fd fd = accept_from(listener);
    if (!fd.is_open()) {
      // Of another user, or none left. Without descriptors the connection stays, and the oldest handshake
      // goes.
      if (errno != EMFILE && errno != ENFILE) return true;
      // accept4() takes the descriptor before it looks whether somebody waits.
      if ((base::ready_events(listener, POLLIN) & POLLIN) == 0) return true;
      if (!make_room(now)) return false;
      continue;
    }
    close_strangers(now);
    try {
      peers_.add_connection(std::move(fd), Role::kListener, nullptr, now);
    } catch (const SystemError& error) {
      base::log_warning(base::concat("a connection was rejected: ", base::message_of(error)));
    }
  }
  return true;  // the listener is still readable
}

// Closes the oldest handshake for its descriptor. False where there is none.
bool Listeners::make_room(Time now) {
  if (core_.table.handshakes().empty()) return false;
  peers_.lose(std::shared_ptr(core_.table.handshakes().front()), now, "there were no descriptors left");
  return true;
}

// Closes the oldest stranger where there are as many as there may be.
void Listeners::close_strangers(Time now) {
  std::size_t count = 0;
  std::shared_ptr<Connection> oldest;
  for (const auto& connection : core_.table.handshakes()) {
    if (connection->handshake->protocol.is_trusted() || connection->peer) continue;
    if (++count == 1) oldest = connection;
  }
  if (count >= kMaxStrangers) peers_.lose(oldest, now, "too many strangers came");
}

}  // namespace cohort::net::node_detail
