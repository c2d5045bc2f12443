#include "cohort/rpc/internal/agent/handler_scope.h"

#include <utility>

namespace cohort::rpc {
namespace {

thread_local AgentCore* agent_of_this_handler = nullptr;

}  // namespace

HandlerScope::HandlerScope(AgentCore* agent) : outer_(std::exchange(agent_of_this_handler, agent)) {}

HandlerScope::~HandlerScope() {
  agent_of_this_handler = outer_;
}

AgentCore* HandlerScope::agent() {
  return agent_of_this_handler;
}

}  // namespace cohort::rpc
