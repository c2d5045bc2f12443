#include "cohort/rpc/internal/protocol/context_protocol.h"

#include <gtest/gtest.h>

namespace cohort::rpc {
namespace {

using ContextEffects = ContextProtocol::Effects;
using ContextMessageType = ContextMessage::Type;

constexpr ContextProtocol::CopyId kNoCopy = ContextProtocol::kNoCopy;
constexpr ContextId kOfWorker0{0, 1};

// What is told to `worker`. Fails where this is not one message.
ContextMessage only_message_to(std::int32_t worker, const ContextEffects& effects) {
  EXPECT_EQ(effects.messages.size(), 1U);
  if (effects.messages.size() != 1) return {};
  EXPECT_EQ(effects.messages.front().first, worker);
  return effects.messages.front().second;
}

TEST(ContextProtocolTest, TheEndSaysHowManyCallsWereMade) {
  ContextProtocol creator(0);
  const ContextId context = creator.create();
  EXPECT_EQ(context, kOfWorker0);
  const auto copy = creator.copy_of(context);
  EXPECT_TRUE(creator.begin_call(copy, 1));
  EXPECT_TRUE(creator.begin_call(copy, 1));
  ContextEffects effects;
  creator.end(context, effects);
  EXPECT_EQ(effects.ended, std::vector{copy});
  const ContextMessage message = only_message_to(1, effects);
  EXPECT_EQ(message.type, ContextMessageType::kEnded);
  EXPECT_EQ(message.context, context);
  EXPECT_EQ(message.num_calls, 2U);
  EXPECT_FALSE(creator.begin_call(copy, 1)) << "it has ended";
  EXPECT_EQ(creator.size(), 0U);
}

TEST(ContextProtocolTest, AContextThatHasEndedIsKnownUntilItsCallsHaveCome) {
  ContextProtocol callee(1);
  ContextEffects effects;
  callee.on_message(0, {ContextMessageType::kEnded, kOfWorker0, 2}, effects);
  EXPECT_EQ(callee.size(), 1U);
  EXPECT_EQ(callee.on_call(0, kOfWorker0), kNoCopy);
  EXPECT_EQ(callee.size(), 1U);
  EXPECT_EQ(callee.on_call(0, kOfWorker0), kNoCopy);
  EXPECT_EQ(callee.size(), 0U);
  EXPECT_TRUE(effects.ended.empty() && effects.messages.empty());
}

TEST(ContextProtocolTest, ACallOfAContextThatIsForgottenMakesACopyThatItsCallerEnds) {
  ContextProtocol callee(1);
  ContextEffects effects;
  const auto first = callee.on_call(0, kOfWorker0);
  callee.on_message(0, {ContextMessageType::kEnded, kOfWorker0, 1}, effects);
  EXPECT_EQ(callee.size(), 0U);
  const auto second = callee.on_call(2, kOfWorker0);
  EXPECT_NE(second, kNoCopy);
  EXPECT_NE(second, first);
  EXPECT_FALSE(callee.begin_call(first, 2)) << "of the handler of the first call";
  callee.on_message(2, {ContextMessageType::kEnded, kOfWorker0, 1}, effects);
  EXPECT_EQ(effects.ended, (std::vector{first, second}));
  EXPECT_EQ(callee.size(), 0U);
}

TEST(ContextProtocolTest, ACallThatIsNotSentNeedNotCome) {
  ContextProtocol creator(0), callee(1);
  const ContextId context = creator.create();
  const auto copy = creator.copy_of(context);
  for (int i = 0; i < 3; ++i) creator.begin_call(copy, 1);
  ContextEffects before, at_end, after;
  creator.cancel_call(copy, context, 1, before);
  EXPECT_TRUE(before.messages.empty());
  creator.end(context, at_end);
  const ContextMessage ended = only_message_to(1, at_end);
  EXPECT_EQ(ended.num_calls, 2U);
  creator.cancel_call(copy, context, 1, after);
  const ContextMessage unsent = only_message_to(1, after);
  EXPECT_EQ(unsent.type, ContextMessageType::kUnsent);
  ContextEffects effects;
  callee.on_message(0, unsent, effects);
  callee.on_message(0, ended, effects);
  EXPECT_EQ(callee.size(), 1U) << "a call has yet to come";
  EXPECT_EQ(callee.on_call(0, context), kNoCopy);
  EXPECT_EQ(callee.size(), 0U);
}

// Also where another caller lives: it may have been called by this worker.
TEST(ContextProtocolTest, TheCreatorTellsAWorkerOfTheEndWhoseCallerHasDied) {
  ContextProtocol creator(0), callee(1);
  const ContextId context = creator.create();
  callee.on_call(2, context);
  callee.on_call(3, context);
  ContextEffects effects, at_creator, at_end;
  callee.on_down(2, effects);
  EXPECT_EQ(callee.num_copies(), 1U) << "the context has not ended";
  const ContextMessage orphaned = only_message_to(0, effects);
  EXPECT_EQ(orphaned.type, ContextMessageType::kOrphaned);
  creator.on_message(1, orphaned, at_creator);
  EXPECT_TRUE(at_creator.messages.empty());
  creator.end(context, at_end);
  EXPECT_EQ(only_message_to(1, at_end).num_calls, 0U);
  creator.on_message(1, orphaned, at_creator);
  const ContextMessage ended = only_message_to(1, at_creator);
  EXPECT_EQ(ended.type, ContextMessageType::kEnded) << "it has ended before";
  callee.on_message(0, ended, effects);
  EXPECT_EQ(callee.num_copies(), 0U);
  EXPECT_EQ(callee.size(), 1U) << "the end of worker 3's copy has yet to come";
  callee.on_down(3, effects);
  EXPECT_EQ(callee.size(), 0U);
}

TEST(ContextProtocolTest, TheDeathOfACreatorEndsItsContexts) {
  ContextProtocol callee(1);
  ContextEffects effects;
  const auto copy = callee.on_call(2, kOfWorker0);
  callee.begin_call(copy, 0);
  callee.on_down(0, effects);
  EXPECT_EQ(effects.ended, std::vector{copy});
  EXPECT_TRUE(effects.messages.empty());
  EXPECT_EQ(callee.on_call(2, kOfWorker0), kNoCopy);
  callee.on_message(2, {ContextMessageType::kEnded, kOfWorker0, 1}, effects);
  EXPECT_EQ(callee.size(), 0U);
}

// Worker 1 loses the creator, and worker 2 does not: the creator may use it yet.
TEST(ContextProtocolTest, ACalleeOfAWorkerThatHasLostTheCreatorAsksTheCreator) {
  ContextProtocol creator(0), caller(1), callee(2);
  const ContextId context = creator.create();
  const auto copy = caller.on_call(0, context);
  caller.begin_call(copy, 2);
  caller.begin_call(copy, 2);
  const auto copy_of_callee = callee.on_call(1, context);
  ContextEffects at_caller, later, at_callee, at_creator, at_end;
  caller.on_down(0, at_caller);
  EXPECT_EQ(at_caller.ended, std::vector{copy});
  const ContextMessage abandoned = only_message_to(2, at_caller);
  EXPECT_EQ(abandoned.type, ContextMessageType::kAbandoned);
  EXPECT_EQ(abandoned.num_calls, 2U);
  callee.on_message(1, abandoned, at_callee);
  EXPECT_EQ(callee.copy_of(context), copy_of_callee) << "the context has not ended";
  const ContextMessage orphaned = only_message_to(0, at_callee);
  EXPECT_EQ(orphaned.type, ContextMessageType::kOrphaned);
  caller.cancel_call(copy, context, 2, later);
  const ContextMessage unsent = only_message_to(2, later);
  EXPECT_EQ(unsent.type, ContextMessageType::kUnsent);
  callee.on_message(1, unsent, at_callee);
  EXPECT_EQ(callee.num_copies(), 1U);
  creator.on_message(2, orphaned, at_creator);
  creator.end(context, at_end);
  callee.on_message(0, only_message_to(2, at_end), at_callee);
  EXPECT_EQ(callee.size(), 0U);
}

// In which order messages come is chance.
TEST(ContextProtocolTest, AnAbandonedCopyMayBeKnownBeforeItsCalls) {
  ContextProtocol callee(2);
  ContextEffects effects;
  callee.on_message(1, {ContextMessageType::kAbandoned, kOfWorker0, 1}, effects);
  EXPECT_EQ(only_message_to(0, effects).type, ContextMessageType::kOrphaned);
  const auto copy = callee.on_call(0, kOfWorker0);
  EXPECT_NE(copy, kNoCopy) << "the creator's own call has a context";
  EXPECT_EQ(callee.on_call(1, kOfWorker0), copy);
  callee.on_message(0, {ContextMessageType::kEnded, kOfWorker0, 1}, effects);
  EXPECT_EQ(effects.ended, std::vector{copy});
  EXPECT_EQ(callee.size(), 0U);
}

}  // namespace
}  // namespace cohort::rpc
