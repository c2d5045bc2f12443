#pragma once

#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cohort/net/internal/socket.h"
#include "cohort/net/node.h"
#include "tests/support/comes_true.h"

namespace cohort::test {

inline net::Message message_of(std::uint32_t channel, std::string header, std::size_t size = 0) {
  net::Message message;
  message.channel = channel;
  message.header = std::move(header);
  if (size > 0) {
    const std::shared_ptr<std::byte> memory(new std::byte[size], std::default_delete<std::byte[]>());
    for (std::size_t i = 0; i < size; ++i) memory.get()[i] = static_cast<std::byte>(i * 7 + size);
    message.payloads.push_back({memory, {memory.get(), size}});
  }
  return message;
}

/// The messages "0", "1", ..., each with the bytes that message_of() gave it.
inline void expect_whole(const std::vector<net::Message>& messages, std::size_t count) {
  ASSERT_EQ(messages.size(), count);
  for (std::size_t i = 0; i < count; ++i) {
    EXPECT_EQ(messages[i].header, std::to_string(i));
    for (const net::Payload& payload : messages[i].payloads) {
      const net::Message sent = message_of(0, "", payload.bytes.size());
      EXPECT_EQ(std::memcmp(payload.bytes.data(), sent.payloads[0].bytes.data(), payload.bytes.size()), 0);
    }
  }
}

/// The descriptors of this process that are connected sockets.
inline std::vector<int> connected_sockets() {
  std::vector<int> found;
  DIR* const folder = ::opendir("/proc/self/fd");
  while (const dirent* const entry = ::readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0) found.push_back(fd);
  }
  ::closedir(folder);
  return found;
}

/// Keeps all that a node hands over, and may send it back.
class Recorder : public net::Handler {
 public:
  explicit Recorder(bool echoes = false) : echoes_(echoes) {}
  void on_connect(const std::shared_ptr<net::Peer>& peer) override {
    const std::lock_guard lock(mutex_);
    peers_.push_back(peer);
  }
  void on_message(const std::shared_ptr<net::Peer>& peer, net::Message message) override {
    if (echoes_) {
      message.credit.reset();
      peer->send(std::move(message));
      return;
    }
    const std::lock_guard lock(mutex_);
    messages_.push_back(std::move(message));
    ++count_;
  }
  void on_down(const std::shared_ptr<net::Peer>&, net::Down down) override {
    const std::lock_guard lock(mutex_);
    down_at_ = std::chrono::steady_clock::now();
    downs_.push_back(std::move(down));
    ++num_downs_;
  }

  std::size_t count() const { return count_; }
  bool is_down() const { return num_downs_ > 0; }
  std::vector<net::Message> take() {
    const std::lock_guard lock(mutex_);
    return std::move(messages_);
  }
  net::Down down() {
    const std::lock_guard lock(mutex_);
    return downs_.at(0);
  }
  std::chrono::steady_clock::time_point down_at() {
    const std::lock_guard lock(mutex_);
    return down_at_;
  }
  std::shared_ptr<net::Peer> peer() {
    wait_until([&] {
      const std::lock_guard lock(mutex_);
      return !peers_.empty();
    });
    return peers_.at(0);
  }

 private:
  const bool echoes_;
  std::mutex mutex_;
  std::vector<net::Message> messages_;
  std::vector<std::shared_ptr<net::Peer>> peers_;
  std::vector<net::Down> downs_;
  std::chrono::steady_clock::time_point down_at_;
  std::atomic<std::size_t> count_{0}, num_downs_{0};
};

/// A node, and what it hears.
struct Worker {
  explicit Worker(const std::string& name, net::NodeOptions options = {}, bool echoes = false)
      : heard(std::make_shared<Recorder>(echoes)) {
    options.name = name;
    node = std::make_unique<net::Node>(options, heard);
  }
  std::shared_ptr<Recorder> heard;
  std::unique_ptr<net::Node> node;
};

}  // namespace cohort::test
