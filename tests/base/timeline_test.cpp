#include "cohort/base/timeline.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

using nlohmann::json;
using namespace std::chrono_literals;

std::vector<json> events_named(const json& trace, const std::string& name) {
  std::vector<json> found;
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("name") == name) found.push_back(event);
  }
  return found;
}

TEST(TimelineTest, ScopesBecomeSpansWithTimesInMicroseconds) {
  Timeline::start();
  {
    const TimelineScope outer("outer");
    std::this_thread::sleep_for(2ms);
    const TimelineScope inner("inner");
    std::this_thread::sleep_for(3ms);
  }
  Timeline::stop();
  const json trace = json::parse(Timeline::json());
  const json outer = events_named(trace, "outer").at(0);
  const json inner = events_named(trace, "inner").at(0);
  EXPECT_EQ(outer.at("ph"), "X");
  EXPECT_GE(inner.at("dur").get<double>(), 3000);
  EXPECT_GE(outer.at("dur").get<double>(), inner.at("dur").get<double>() + 2000);
  EXPECT_GE(inner.at("ts").get<double>(), outer.at("ts").get<double>() + 2000);
  EXPECT_GE(outer.at("ts").get<double>(), 0);
  EXPECT_EQ(outer.at("tid"), inner.at("tid"));
  EXPECT_TRUE(outer.at("pid").is_number_integer());
}

TEST(TimelineTest, NothingIsRecordedWhileStopped) {
  Timeline::start();
  Timeline::stop();
  {
    const TimelineScope scope("unseen");
    Timeline::counter("unseen", 1);
    Timeline::instant("unseen");
  }
  EXPECT_TRUE(events_named(json::parse(Timeline::json()), "unseen").empty());
}

TEST(TimelineTest, SpanThatBeganBeforeRecordingIsLeftOut) {
  Timeline::start();
  {
    const TimelineScope scope("early");
    Timeline::start();
  }
  Timeline::stop();
  EXPECT_TRUE(events_named(json::parse(Timeline::json()), "early").empty());
}

TEST(TimelineTest, CountersAndInstantsAreWritten) {
  Timeline::start();
  Timeline::counter("loss", 0.25);
  Timeline::counter("loss", std::nan(""));
  Timeline::instant("epoch 1");
  Timeline::stop();
  const json trace = json::parse(Timeline::json());
  const std::vector<json> losses = events_named(trace, "loss");
  ASSERT_EQ(losses.size(), 2u);
  EXPECT_EQ(losses[0].at("ph"), "C");
  EXPECT_EQ(losses[0].at("args").at("value"), 0.25);
  EXPECT_TRUE(losses[1].at("args").at("value").is_null()) << "JSON has no NaN";
  EXPECT_EQ(events_named(trace, "epoch 1").at(0).at("ph"), "i");
}

TEST(TimelineTest, ThreadsHaveTheirOwnRowsAndNames) {
  Timeline::start();
  Timeline::name_process("rank 3");
  Timeline::name_thread("main \"loop\"");
  const TimelineScope scope("here");
  std::thread([]() {
    Timeline::name_thread("worker 1");
    const TimelineScope there("there");
  }).join();
  Timeline::instant("here too");
  Timeline::stop();
  const json trace = json::parse(Timeline::json());
  std::map<std::string, int> threads;
  for (const json& event : events_named(trace, "thread_name")) {
    threads[event.at("args").at("name")] = event.at("tid");
  }
  EXPECT_EQ(threads.at("worker 1"), events_named(trace, "there").at(0).at("tid"));
  EXPECT_EQ(threads.at("main \"loop\""), events_named(trace, "here too").at(0).at("tid"));
  EXPECT_EQ(events_named(trace, "process_name").at(0).at("args").at("name"), "rank 3");
}

TEST(TimelineTest, TheNameOfAThreadThatEndedStandsInItsTraceAndInNoLaterOne) {
  Timeline::start();
  std::thread([] {
    Timeline::name_thread("short-lived");
    Timeline::instant("there");
  }).join();
  Timeline::stop();
  EXPECT_NE(Timeline::json().find("short-lived"), std::string::npos);
  Timeline::start();
  Timeline::stop();
  EXPECT_EQ(Timeline::json().find("short-lived"), std::string::npos);
}

TEST(TimelineTest, RowsThatAreNoThreadHaveTheirNamesAndNumbers) {
  Timeline::start();
  const int track = Timeline::track("world");
  EXPECT_EQ(Timeline::track("world"), track) << "the same name is the same row";
  EXPECT_NE(Timeline::track("other"), track);
  const auto begin = Timeline::Clock::now();
  Timeline::complete("sum", begin, {.track = track, .key = "bytes", .value = 24});
  Timeline::complete("here", begin, {.key = "n", .value = 1});
  Timeline::stop();
  const json trace = json::parse(Timeline::json());
  const json sum = events_named(trace, "sum").at(0);
  EXPECT_EQ(sum.at("args").at("bytes"), 24);
  EXPECT_EQ(sum.at("tid"), track);
  EXPECT_NE(events_named(trace, "here").at(0).at("tid"), track);
  std::map<int, std::string> names;
  for (const json& event : events_named(trace, "thread_name")) {
    names[event.at("tid")] = event.at("args").at("name");
  }
  EXPECT_EQ(names.at(track), "world");
}

TEST(TimelineTest, AnArrowLeadsFromSpanToSpan) {
  using Type = Timeline::ArrowPoint::Type;
  constexpr std::uint64_t kId = 0xfedcba9876543210;
  Timeline::start();
  const int track = Timeline::track("calls");
  const auto begin = Timeline::Clock::now();
  Timeline::complete("call", begin, {.track = track});
  Timeline::arrow("way", {.type = Type::kBegin, .id = kId, .track = track, .time = begin + 1us});
  {
    const TimelineScope scope("handler");
    Timeline::arrow("way", {.type = Type::kNext, .id = kId});
    Timeline::arrow("way", {.type = Type::kEnd, .id = kId});
  }
  Timeline::stop();
  Timeline::arrow("way", {.id = kId});
  const json trace = json::parse(Timeline::json());
  const std::vector<json> points = events_named(trace, "way");
  ASSERT_EQ(points.size(), 3u) << "none while it is stopped";
  std::string kinds;
  for (const json& point : points) {
    kinds += point.at("ph").get<std::string>();
    EXPECT_EQ(point.at("id"), "0xfedcba9876543210");
    EXPECT_EQ(point.at("cat"), points[0].at("cat"));
    EXPECT_EQ(point.contains("bp"), point.at("ph") == "f");
  }
  EXPECT_EQ(kinds, "stf");
  const json call = events_named(trace, "call").at(0), handler = events_named(trace, "handler").at(0);
  EXPECT_EQ(points[0].at("tid"), track);
  EXPECT_NEAR(points[0].at("ts").get<double>(), call.at("ts").get<double>() + 1, 1e-3);
  EXPECT_EQ(points[1].at("tid"), handler.at("tid"));
  EXPECT_GE(points[1].at("ts").get<double>(), handler.at("ts").get<double>());
}

TEST(TimelineTest, EventsGoIntoATraceOfSeveralProcessesUnderOneClock) {
  Timeline::start();
  Timeline::instant("now");
  Timeline::stop();
  Timeline::name_process("");
  const json alone = json::parse(Timeline::json());
  const json joint =
      json::parse("{\"traceEvents\":[" + Timeline::events(7, "rank 7", Timeline::origin() - 2s) + "]}");
  const json event = events_named(joint, "now").at(0);
  EXPECT_EQ(event.at("pid"), 7);
  EXPECT_NEAR(event.at("ts").get<double>(), events_named(alone, "now").at(0).at("ts").get<double>() + 2e6,
              0.01);
  EXPECT_EQ(events_named(joint, "process_name").at(0).at("args").at("name"), "rank 7");
}

TEST(TimelineTest, MemoryIsBoundedAndWhatIsDroppedIsCounted) {
  Timeline::start(10);
  for (int i = 0; i < 25; ++i) Timeline::instant("tick");
  Timeline::stop();
  const json trace = json::parse(Timeline::json());
  EXPECT_EQ(events_named(trace, "tick").size(), 10u);
  EXPECT_EQ(trace.at("otherData").at("dropped_events"), 15);
  Timeline::start(10);
  Timeline::stop();
  EXPECT_EQ(json::parse(Timeline::json()).at("otherData").at("dropped_events"), 0) << "a new start forgets";
}

TEST(TimelineTest, NamesMadeAtRunTimeAreKeptAndAnyBytesStayValidJson) {
  const char* name = nullptr;
  {
    const std::string text = "layer \"1\"\n\xff";
    name = Timeline::intern(text);
    EXPECT_EQ(Timeline::intern(text), name) << "the same text is kept once";
  }
  Timeline::start();
  Timeline::instant(name);
  Timeline::stop();
  const json trace = json::parse(Timeline::json());
  EXPECT_EQ(events_named(trace, "layer \"1\"\n\xef\xbf\xbd").size(), 1u);
}

TEST(TimelineTest, ManyThreadsRecordWhileOneStartsAndStops) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([]() {
      for (int k = 0; k < 2000; ++k) {
        const TimelineScope scope("work");
        Timeline::counter("k", k);
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    Timeline::start(1000);
    const json trace = json::parse(Timeline::json());
    EXPECT_LE(trace.at("traceEvents").size(), 1000u + 100u);
    Timeline::stop();
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(TimelineTest, FileHoldsTheTraceAndAMissingFolderIsNamed) {
  const test::TempDir dir;
  Timeline::start();
  Timeline::instant("one");
  Timeline::stop();
  Timeline::write(dir / "trace.json");
  EXPECT_EQ(test::read_file(dir / "trace.json"), Timeline::json());
  COHORT_EXPECT_THROW_WITH(Timeline::write(dir / "no" / "trace.json"), SystemError, "making the folder");
}

}  // namespace
}  // namespace cohort::base
