#include "cohort/rpc/internal/agent/handler_scope.h"

#include <gtest/gtest.h>

#include <thread>

#include "cohort/rpc/internal/agent/agent_core.h"

namespace cohort::rpc {
namespace {

TEST(HandlerScopeTest, TheNewestScopeOfTheThreadCountsAndTheOuterOneReturns) {
  AgentCore outer({"w0", 0}, {}), inner({"w1", 1}, {});
  EXPECT_EQ(HandlerScope::agent(), nullptr);
  {
    const HandlerScope outer_scope(&outer);
    {
      const HandlerScope inner_scope(&inner);
      EXPECT_EQ(HandlerScope::agent(), &inner);
    }
    EXPECT_EQ(HandlerScope::agent(), &outer);
    std::thread([] { EXPECT_EQ(HandlerScope::agent(), nullptr); }).join();
  }
  EXPECT_EQ(HandlerScope::agent(), nullptr);
}

TEST(HandlerScopeTest, AMessageThatComesOnAHandlersThreadIsOfNoHandler) {
  AgentCore agent({"w0", 0}, {});
  const HandlerScope scope(&agent);
  {
    const DeliveryScope delivery;
    EXPECT_EQ(HandlerScope::agent(), nullptr);
  }
  EXPECT_EQ(HandlerScope::agent(), &agent);
}

}  // namespace
}  // namespace cohort::rpc
