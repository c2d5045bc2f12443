#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cohort/net/message.h"
#include "cohort/rpc/internal/agent/agent_core.h"
#include "cohort/rpc/internal/keyed_async_mutex.h"

namespace cohort::rpc {

/// Sends the messages of an agent, each once the owners of its references know of them, and those of a
/// channel in the order of the calls. Threads: any, without the mutex of CallTables.
class MessageSender {
 public:
  using Channel = std::optional<std::string>;
  using OnError = std::function<void(std::exception_ptr)>;

  /// `deliver` takes the messages of this worker to itself.
  MessageSender(AgentCore& core, std::function<void(net::Message)> deliver)
      : core_(core), deliver_(std::move(deliver)) {}

  /// Sends a message that waits for nothing. Throws for a tensor that cannot travel, and for an object that
  /// is gone.
  void send(const std::string& worker, Encoded message, const Channel& channel = {});
  /// Sends a message once its references are known to their owners. `on_error`: what send() throws.
  /// `is_wanted` is asked then; if it says no the message is not sent.
  void send_when_resolved(const std::string& worker, Encoded message, OnError on_error,
                          std::function<bool()> is_wanted = nullptr, const Channel& channel = {});
  /// Sends what the end of contexts leads to, and frees what is left of them.
  void send_effects(Contexts::Effects effects);
  /// At the end of the agent: messages that wait for their channel are dropped, and those that are to wait
  /// from now on.
  void stop() { channels_->clear(); }

 private:
  void send_or_fail(const std::string& worker, Encoded message, const Channel& channel,
                    const OnError& on_error);

  AgentCore& core_;
  const std::function<void(net::Message)> deliver_;
  const std::shared_ptr<KeyedAsyncMutex> channels_ =
      std::make_shared<KeyedAsyncMutex>();  // by worker and channel
};

}  // namespace cohort::rpc
