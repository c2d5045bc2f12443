#include "cohort/membership/record.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/membership/internal/agent_message.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::membership {
namespace {

using nlohmann::json;

MemberInfo agent_with(MemberId id) {
  return {id, "incarnation " + std::to_string(id), "host" + std::to_string(id) + ":29400",
          static_cast<int>(id)};
}

RendezvousRecord some_record() {
  RendezvousRecord record;
  record.settings.run_id = "a \"run\" \xc3\xa9\n";
  record.settings.max_nodes = 8;
  record.origin = "incarnation 1";
  record.settings.is_embedded = false;
  record.state = RunState::kRunning;
  record.generation = {7, true, {agent_with(1), agent_with(4)}, 24, 1'234, "n1:4711", "agent 4 joins", 517};
  record.waiting = {agent_with(9)};
  record.spares = {agent_with(5), agent_with(6)};
  record.awaited = {{"incarnation 7", 1'233}, {"incarnation 8", 1'234}};
  record.next_id = 10;
  record.restarts_used = 2;
  record.was_link_lost = true;
  record.exit_status = 3;
  return record;
}

TEST(GenerationTest, BlocksOfVirtualRanksCoverAllOnce) {
  for (int virtual_ranks = 0; virtual_ranks < 30; ++virtual_ranks) {
    Generation generation;
    generation.virtual_ranks = virtual_ranks;
    for (MemberId id = 1; id <= 4; ++id) {
      generation.members.push_back(agent_with(id));
      int next = 0;
      for (int process = 0; process < generation.num_processes(); ++process) {
        const VirtualBlock block = generation.block(process);
        EXPECT_EQ(block.first, next);
        EXPECT_GE(block.end, block.first);
        next = block.end;
      }
      EXPECT_EQ(next, virtual_ranks);
    }
  }
}

TEST(GenerationTest, ProcessesAreNumberedByMember) {
  const Generation generation = some_record().generation;
  EXPECT_EQ(generation.num_processes(), 5);
  EXPECT_EQ(generation.first_process(1), 0);
  EXPECT_EQ(generation.first_process(4), 1);
  EXPECT_EQ(generation.find(4)->address, "host4:29400");
  EXPECT_EQ(generation.find(9), nullptr);
  COHORT_EXPECT_THROW_WITH(generation.first_process(9), UsageError, "agent 9 is no member of generation 7");
}

TEST(RecordTest, ARecordIsTheSameAfterItsText) {
  const RendezvousRecord record = some_record();
  EXPECT_EQ(parse_record(to_text(record)), record);
  EXPECT_EQ(parse_record(to_text(RendezvousRecord())), RendezvousRecord());
  EXPECT_EQ(to_text(record).rfind("{\"cohort_membership\":4,", 0), 0U) << "the version stands first";
}

TEST(RecordTest, AgentsAreFoundByTheirIncarnation) {
  RendezvousRecord record = some_record();
  EXPECT_EQ(record.find("incarnation 4")->id, 4U);
  EXPECT_EQ(record.find("incarnation 9")->id, 9U);
  EXPECT_EQ(record.find("incarnation 5")->id, 5U);
  EXPECT_EQ(record.find("incarnation 2"), nullptr);
  record.state = RunState::kForming;
  EXPECT_EQ(record.find("incarnation 4"), nullptr) << "the generation is over";
}

TEST(RecordTest, EachFieldMustBeThereAndNoOther) {
  const json whole = json::parse(to_text(some_record()));
  const auto expect_rejected = [](const json& changed) {
    EXPECT_THROW(parse_record(changed.dump()), CommError) << changed.dump();
  };
  const auto check_object = [&](const json::json_pointer& at) {
    const json object = whole.at(at);
    for (const auto& [key, value] : object.items()) {
      json changed = whole;
      changed.at(at).erase(key);
      expect_rejected(changed);
      changed = whole;
      changed.at(at)[key] = value.is_object() ? json(3) : json::object();
      expect_rejected(changed);
    }
    json changed = whole;
    changed.at(at)["more"] = 1;
    expect_rejected(changed);
  };
  for (const char* const at :
       {"", "/settings", "/generation", "/generation/members/1", "/waiting/0", "/waits_for/1"}) {
    check_object(json::json_pointer(at));
  }
}

TEST(RecordTest, WhatNoAgentWritesIsRejected) {
  const json whole = json::parse(to_text(some_record()));
  const auto with = [&](const char* at, const json& value) {
    json changed = whole;
    changed.at(json::json_pointer(at)) = value;
    return changed.dump();
  };
  COHORT_EXPECT_THROW_WITH(parse_record(with("/cohort_membership", 5)), CommError, "version 5, expected 4");
  COHORT_EXPECT_THROW_WITH(parse_record(with("/state", "resting")), CommError,
                           "state is not a state that this version knows");
  COHORT_EXPECT_THROW_WITH(parse_record(with("/generation/members/1/id", 1)), CommError,
                           "above that of the agent before it");
  COHORT_EXPECT_THROW_WITH(parse_record(with("/settings/max_nodes", 0)), CommError,
                           "max_nodes is not a number in its range");
  COHORT_EXPECT_THROW_WITH(parse_record(with("/restarts_used", 3'000'000'000)), CommError, "restarts_used");
  json many = json::array();
  for (std::uint64_t id = 1; id <= 131'073; ++id) {
    many.push_back({{"id", id}, {"incarnation", ""}, {"address", ""}, {"processes", kMaxProcesses}});
  }
  COHORT_EXPECT_THROW_WITH(parse_record(with("/generation/members", many)), CommError, "processes");
  // What an agent could not count with, or decide by.
  COHORT_EXPECT_THROW_WITH(parse_record(with("/generation/members/1/processes", 1 << 15)), CommError,
                           "processes");
  COHORT_EXPECT_THROW_WITH(parse_record(with("/settings/max_nodes", 1 << 17)), CommError, "max_nodes");
  EXPECT_EQ(parse_record(with("/settings/max_nodes", 1)).generation.members.size(), 2U) << "one leaves";
  json three = whole["generation"]["members"];
  three.push_back({{"id", 8}, {"incarnation", "x"}, {"address", ""}, {"processes", 1}});
  json crowded = whole;
  crowded["settings"]["max_nodes"] = 1;
  crowded["generation"]["members"] = three;
  COHORT_EXPECT_THROW_WITH(parse_record(crowded.dump()), CommError,
                           "has 3 members, of at most 1 and one that leaves");
  COHORT_EXPECT_THROW_WITH(parse_record(with("/next_id", ~std::uint64_t{0})), CommError, "next_id");
  COHORT_EXPECT_THROW_WITH(parse_record(with("/next_id", 9)), CommError,
                           "agent 9 of the record has an id that nobody was given");
  COHORT_EXPECT_THROW_WITH(parse_record(with("/waiting/0/id", 5)), CommError, "agent 5 is in the record");
  COHORT_EXPECT_THROW_WITH(parse_record(with("/waiting/0/incarnation", "incarnation 1")), CommError, "twice");
  COHORT_EXPECT_THROW_WITH(parse_record("{\"cohort_membership\":"), CommError, "no JSON");
  COHORT_EXPECT_THROW_WITH(parse_record("{}"), CommError, "has no cohort_membership");
  COHORT_EXPECT_THROW_WITH(parse_record(std::string(100'000, '[')), CommError, "nested too deep");
}

TEST(RecordTest, ChangedTextsAreReadOrRejected) {
  const std::string whole = to_text(some_record());
  std::mt19937 random(5);
  for (int round = 0; round < 3'000; ++round) {
    std::string changed = whole;
    for (std::size_t i = 1 + random() % 4; i > 0; --i)
      changed[random() % changed.size()] = static_cast<char>(random() % 256);
    try {
      const RendezvousRecord record = parse_record(changed);
      EXPECT_EQ(parse_record(to_text(record)), record);
    } catch (const CommError&) {
    }
  }
}

TEST(RecordTest, ADifferenceOfSettingsIsNamed) {
  RunSettings given;
  EXPECT_EQ(difference(given, given), "");
  given.max_nodes = 4;
  EXPECT_EQ(difference(given, RunSettings()), "max_nodes is 4 here, and 1 in the run");
}

TEST(AgentMessageTest, AMessageIsTheSameAfterItsText) {
  AgentMessage message;
  message.type = AgentMessage::Type::kReport;
  message.incarnation = "x";
  message.address = "n3:1";
  message.origin = "y";
  message.revision = 12;
  message.report.failure = "rank 3 was killed by signal 9";
  message.report.exit_status = 137;
  message.report.ends_run = true;
  message.report.stop_signal = 15;
  message.report.stuck = "local rank 1 has not entered it";
  message.report.lost_links = {1, 2};
  message.report.unheard = {7};
  message.report.known = 5;
  EXPECT_EQ(parse_agent_message(to_text(message)), message);
  message.settings = RunSettings();
  EXPECT_EQ(parse_agent_message(to_text(message)), message);
  AgentMessage record;
  record.type = AgentMessage::Type::kRecord;
  record.text = to_text(some_record());
  EXPECT_EQ(parse_agent_message(to_text(record)), record);
}

TEST(AgentMessageTest, WhatNoAgentSendsIsRejected) {
  AgentMessage message;
  message.type = AgentMessage::Type::kReport;
  const json whole = json::parse(to_text(message));
  json changed = whole;
  changed["type"] = "shout";
  COHORT_EXPECT_THROW_WITH(parse_agent_message(changed.dump()), CommError,
                           "type is not a type that this version knows");
  changed = whole;
  changed["report"]["unheard"] = {-1};
  COHORT_EXPECT_THROW_WITH(parse_agent_message(changed.dump()), CommError, "unheard is not a list of ids");
  changed = whole;
  changed.erase("report");
  COHORT_EXPECT_THROW_WITH(parse_agent_message(changed.dump()), CommError, "has no report");
}

// A seed of another version would show the fuzzer the first field alone.
TEST(RecordTest, TheFuzzersSeedsAreOfThisVersion) {
  for (const char* const seed : {"record_running", "record_forming", "record_ended"}) {
    const std::string text = test::read_file(test::source_dir() / "tests/fuzz/corpus/membership" / seed);
    EXPECT_NO_THROW(parse_record(std::string_view(text).substr(1))) << seed;
  }
}

}  // namespace
}  // namespace cohort::membership
