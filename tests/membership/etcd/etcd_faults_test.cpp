// The store against servers that answer as no etcd does, or as one whose connections break.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/membership/etcd/internal/base64.h"
#include "tests/membership/store_user.h"
#include "tests/support/contains.h"
#include "tests/support/net/http.h"
#include "tests/support/net/port.h"
#include "tests/support/seeds.h"

namespace cohort::membership {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using test::HttpServer;
using test::LogLines;
using test::StoreUser;
using Type = StoreAnswer::Type;

// A busy host takes a while.
EtcdOptions patient_options(const std::vector<std::string>& endpoints) {
  EtcdOptions options;
  options.endpoints = endpoints;
  options.request_timeout = milliseconds(10'000);
  options.swap_timeout = milliseconds(30'000);
  return options;
}
EtcdOptions hasty_options(const std::vector<std::string>& endpoints) {
  EtcdOptions options = patient_options(endpoints);
  options.request_timeout = milliseconds(200);
  options.swap_timeout = milliseconds(500);
  return options;
}

// A key in memory, behind the three requests that the store makes.
class FakeEtcd {
 public:
  enum class Fault {
    kNone,
    kLoseRequest,  // the connection ends before it is read
    kLoseAnswer,   // after what it asked for was done
    kSlow,         // it is answered after the client's time is over
    kBusy,         // status 503
    kGarbage,
    kEndWatch,
    kMuteWatch  // it tells no change, and does not end
  };
  using Faults = std::function<Fault(const std::string& path)>;

  explicit FakeEtcd(
      Faults faults = [](const std::string&) { return Fault::kNone; }, std::string prefix = "/v3")
      : faults_(std::move(faults)), prefix_(std::move(prefix)) {}

  std::string endpoint() const { return server_.endpoint(); }
  /// All that were written, by revision.
  std::map<std::uint64_t, std::string> written() const {
    const std::lock_guard lock(mutex_);
    return written_;
  }
  void heal() { is_healed_ = true; }

 private:
  void handle(const HttpServer::Request& request, HttpServer::Connection& connection) {
    if (request.path.rfind(prefix_ + "/", 0) != 0) {
      connection.answer(404, "404 page not found\n");
      return;
    }
    const std::string path = request.path.substr(prefix_.size());
    const Fault fault = is_healed_ ? Fault::kNone : faults_(path);
    if (fault == Fault::kLoseRequest) return connection.close();
    if (fault == Fault::kBusy) {
      connection.answer(503, R"({"error":"etcdserver: no leader","code":14})");
      return;
    }
    const json body = json::parse(request.body);
    if (path == "/watch") return serve_watch(body.at("create_request"), connection, fault);
    const std::string answer = path == "/kv/range" ? range(body) : swap(body);
    if (fault == Fault::kLoseAnswer) return connection.close();
    if (fault == Fault::kSlow) std::this_thread::sleep_for(milliseconds(250));
    connection.answer(200, fault == Fault::kGarbage ? answer.substr(0, answer.size() / 2) : answer);
  }

  json header() const { return {{"cluster_id", "9"}, {"revision", std::to_string(revision_)}}; }
  json pair(std::uint64_t revision, bool with_text = true) const {
    json pair = {{"mod_revision", std::to_string(revision)}};
    if (with_text) pair["value"] = etcd::encode_base64(written_.at(revision));
    return pair;
  }

  std::string range(const json& body) const {
    const std::lock_guard lock(mutex_);
    json answer = {{"header", header()}};
    if (!written_.empty())
      answer["kvs"] = json::array({pair(written_.rbegin()->first, !body.contains("keys_only"))});
    return answer.dump();
  }

  std::string swap(const json& body) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t newest = written_.empty() ? 0 : written_.rbegin()->first;
    const json& compare = body.at("compare").at(0);
    const bool is_made = compare.at("mod_revision") == std::to_string(newest);
    if (is_made) {
      revision_ += 1 + revision_ % 3;  // other keys change too
      const std::string text = body.at("success").at(0).at("request_put").at("value");
      written_[revision_] = etcd::decode_base64(text).value();
    }
    json answer = {{"header", header()}};
    if (is_made) {
      answer["succeeded"] = true;
    } else {
      json found = json::object();
      if (newest > 0) found["kvs"] = json::array({pair(newest)});
      answer["responses"] = json::array({json::object({{"response_range", found}})});
    }
    return answer.dump();
  }

  void serve_watch(const json& request, HttpServer::Connection& connection, Fault fault) {
    std::uint64_t from = std::stoull(request.at("start_revision").get<std::string>());
    connection.begin_stream();
    {
      const std::lock_guard lock(mutex_);
      connection.send_chunk(json({{"result", {{"header", header()}, {"created", true}}}}).dump() + "\n");
    }
    while (connection.is_open()) {
      std::string line;
      {
        const std::lock_guard lock(mutex_);
        const auto next = written_.lower_bound(from);
        if (next != written_.end() && fault != Fault::kMuteWatch) {
          const json event = json::object({{"kv", pair(next->first)}});
          line = json({{"result", {{"header", header()}, {"events", json::array({event})}}}}).dump() + "\n";
          from = next->first + 1;
        }
      }
      if (line.empty()) {
        std::this_thread::sleep_for(milliseconds(2));
        continue;
      }
      if (fault == Fault::kEndWatch || fault == Fault::kLoseAnswer) return connection.close();
      if (fault == Fault::kGarbage) line.insert(line.size() / 3, "\x01}{");
      // In two pieces, wherever the line is.
      connection.send_chunk(line.substr(0, line.size() / 2));
      connection.send_chunk(line.substr(line.size() / 2));
    }
  }

  const Faults faults_;
  const std::string prefix_;
  std::atomic<bool> is_healed_{false};
  mutable std::mutex mutex_;
  std::uint64_t revision_ = 1;
  std::map<std::uint64_t, std::string> written_;
  HttpServer server_{[this](const auto& request, auto& connection) { handle(request, connection); }};
};

// Each swap adds a text of its own. The one that is asked is told the truth, whatever breaks.
void check_user(StoreUser& user, const std::string& name, int num_swaps,
                std::map<std::string, Type>& outcomes) {
  std::uint64_t known = user.read().revision;
  for (int i = 0; i < num_swaps; ++i) {
    const std::string text = name + " " + std::to_string(i);
    const StoreAnswer answer = user.swap(known, text);
    outcomes[text] = answer.type;
    known = answer.type == Type::kUnknown ? user.read().revision : answer.revision;
  }
}

TEST(EtcdFaultsTest, RandomFaultsLoseAndRepeatNothing) {
  using Fault = FakeEtcd::Fault;
  const test::Seeds seeds = test::Seeds::usual(2);
  for (unsigned seed = seeds.first; seed < seeds.end; ++seed) {
    std::mutex mutex;
    std::mt19937 random(seed);
    const auto draw = [&](const std::string&) {
      const std::lock_guard lock(mutex);
      const unsigned number = random() % 20;
      return number > 6 ? Fault::kNone : static_cast<Fault>(number);
    };
    FakeEtcd etcd(draw);
    const LogLines log;
    StoreUser a(hasty_options({etcd.endpoint()})), b(hasty_options({etcd.endpoint()}));
    std::map<std::string, Type> outcomes_a, outcomes_b;
    std::thread other([&] { check_user(b, "b", 10, outcomes_b); });
    check_user(a, "a", 10, outcomes_a);
    other.join();
    etcd.heal();
    const std::map<std::uint64_t, std::string> written = etcd.written();
    std::map<std::string, int> times;
    for (const auto& [revision, text] : written) ++times[text];
    outcomes_a.insert(outcomes_b.begin(), outcomes_b.end());
    for (const auto& [text, outcome] : outcomes_a) {
      EXPECT_LE(times[text], 1) << text;
      if (outcome == Type::kSwapped) EXPECT_EQ(times[text], 1) << text << ", seed " << seed;
      if (outcome == Type::kConflict) EXPECT_EQ(times[text], 0) << text << ", seed " << seed;
    }
    EXPECT_EQ(log.count("was deleted"), 0U) << log.text();
    for (StoreUser* const user : {&a, &b}) {
      EXPECT_TRUE(test::comes_true([&] { return user->read().text == written.rbegin()->second; }))
          << log.text();
      std::uint64_t told = 0;
      for (const StoreAnswer& answer : user->answers()) {
        if (answer.revision > 0) EXPECT_GE(answer.revision, told) << "seed " << seed;
        told = std::max(told, answer.revision);
        if (answer.revision > 0) EXPECT_EQ(answer.text, written.at(answer.revision)) << "seed " << seed;
      }
    }
  }
}

TEST(EtcdFaultsTest, ASwapWhoseAnswerIsLostIsFoundToBeMade) {
  std::atomic<int> num_lost{0};
  FakeEtcd etcd([&](const std::string& path) {
    const bool is_first = path == "/kv/txn" && num_lost.fetch_add(1) == 0;
    return is_first ? FakeEtcd::Fault::kLoseAnswer : FakeEtcd::Fault::kNone;
  });
  const LogLines log;
  StoreUser a(patient_options({etcd.endpoint()}));
  EXPECT_EQ(a.swap(0, "text").type, Type::kSwapped);
  EXPECT_EQ(etcd.written().size(), 1U);
}

TEST(EtcdFaultsTest, AReadThatIsAnsweredLateIsNoLostRecord) {
  std::atomic<int> num_reads{0};
  FakeEtcd etcd([&](const std::string& path) {
    const bool is_second = path == "/kv/range" && num_reads.fetch_add(1) == 1;
    return is_second ? FakeEtcd::Fault::kSlow : FakeEtcd::Fault::kNone;
  });
  const LogLines log;
  StoreUser a(patient_options({etcd.endpoint()}));
  ASSERT_TRUE(test::comes_true([&] { return num_reads > 0; }));
  const std::size_t begin = a.num_answers();
  a.ask();
  ASSERT_TRUE(test::comes_true([&] { return num_reads > 1; }));
  const StoreAnswer swapped = a.swap(0, "text");
  ASSERT_EQ(swapped.type, Type::kSwapped);
  // It was read before the swap, and comes after it.
  const StoreAnswer read =
      a.wait_for(begin, [](const StoreAnswer& answer) { return answer.type == Type::kRecord; });
  EXPECT_EQ(read.revision, swapped.revision);
  EXPECT_EQ(log.count("was deleted"), 0U) << log.text();
}

TEST(EtcdFaultsTest, AnOlderPathOfTheGatewayIsFound) {
  FakeEtcd etcd([](const std::string&) { return FakeEtcd::Fault::kNone; }, "/v3beta");
  const LogLines log;
  StoreUser a(patient_options({etcd.endpoint()})), b(patient_options({etcd.endpoint()}));
  EXPECT_EQ(a.swap(0, "text").type, Type::kSwapped);
  b.wait_for_record("text");
  EXPECT_EQ(log.count("404"), 0U) << log.text();
}

TEST(EtcdFaultsTest, ServersThatAreNoEtcdAreNamedAndPassedOver) {
  static constexpr std::string_view kSilent = "no answer in time";
  struct Case {
    std::string_view part;  // of the log
    HttpServer::Handler handler;
  };
  const auto sends = [](std::string bytes) {
    return [bytes = std::move(bytes)](const auto&, HttpServer::Connection& connection) {
      connection.send(bytes);
      connection.close();
    };
  };
  const auto answers = [](int status, std::string body) {
    return [=](const auto&, HttpServer::Connection& connection) { connection.answer(status, body); };
  };
  const auto is_silent = [](const auto&, HttpServer::Connection& connection) {
    while (connection.is_open()) std::this_thread::sleep_for(milliseconds(5));
  };
  const auto is_endless = [](const auto&, HttpServer::Connection& connection) {
    connection.begin_stream();
    const std::string piece(1 << 20, ' ');
    while (connection.is_open() && connection.send_chunk(piece)) {
    }
  };
  const std::vector<Case> cases{
      {"as no gateway of etcd v3 answers. Try: etcd 3.4", answers(404, "<html>\n")},
      {"status 301 (\"moved\")", answers(301, "moved")},
      {"an answer of etcd is no JSON object", answers(200, "hello")},
      {"an answer of etcd is no JSON object", answers(200, std::string(50'000, '['))},
      {"an answer of etcd has no header", answers(200, "{}")},
      {"etcdserver: no leader", answers(503, R"({"error":"etcdserver: no leader","code":14})")},
      {"Server returned nothing", sends("")},
      {"Transferred a partial file", sends("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")},
      {kSilent, is_silent},
      {"its answer is longer than 16 MiB", is_endless},
  };
  for (const Case& test_case : cases) {
    FakeEtcd etcd;
    const HttpServer server(test_case.handler);
    const LogLines log;
    EtcdOptions options = patient_options({server.endpoint(), etcd.endpoint()});
    if (test_case.part == kSilent) options.request_timeout = milliseconds(200);
    StoreUser a(options);
    EXPECT_EQ(a.swap(0, "text").type, Type::kSwapped) << test_case.part << ":\n" << log.text();
    EXPECT_TRUE(log.come_to_have(std::string(test_case.part))) << test_case.part << ":\n" << log.text();
  }
}

TEST(EtcdFaultsTest, TheSameTroubleIsLoggedOnce) {
  FakeEtcd etcd([](const std::string& path) {
    return path == "/watch" ? FakeEtcd::Fault::kLoseRequest : FakeEtcd::Fault::kNone;
  });
  const LogLines log;
  StoreUser a(patient_options({etcd.endpoint()})), b(patient_options({etcd.endpoint()}));
  // Without a watch changes are found all the same.
  std::uint64_t revision = 0;
  for (int i = 0; i < 2; ++i) {
    const StoreAnswer answer = b.swap(revision, std::to_string(i));
    ASSERT_EQ(answer.type, Type::kSwapped);
    revision = answer.revision;
    EXPECT_EQ(a.wait_for_record(std::to_string(i)).revision, revision);
  }
  EXPECT_EQ(log.count("to watch"), 2U) << "by each of both:\n" << log.text();
}

// Its member may be gone without a word. What it missed is read, and what comes later must not wait for a
// read each time.
TEST(EtcdFaultsTest, AWatchThatHasMissedAChangeIsMadeAnew) {
  std::atomic<int> num_watches{0};
  FakeEtcd etcd([&](const std::string& path) {
    const bool is_first = path == "/watch" && num_watches++ == 0;
    return is_first ? FakeEtcd::Fault::kMuteWatch : FakeEtcd::Fault::kNone;
  });
  StoreUser a(patient_options({etcd.endpoint()}));
  ASSERT_TRUE(test::comes_true([&] { return num_watches == 1; }));
  StoreUser b(patient_options({etcd.endpoint()}));
  const StoreAnswer answer = b.swap(0, "text");
  ASSERT_EQ(answer.type, Type::kSwapped);
  EXPECT_EQ(a.wait_for_record("text").revision, answer.revision);
  EXPECT_TRUE(test::comes_true([&] { return num_watches == 3; })) << num_watches;
}

TEST(EtcdFaultsTest, AStoreEndsWhateverItWaitsFor) {
  const test::Port silent(test::Port::Use::kListens), closed(test::Port::Use::kRejects);
  const LogLines log;
  for (const std::string& endpoint :
       {"127.0.0.1:" + silent.text(), "127.0.0.1:" + closed.text(), std::string("no-such-host.invalid:1")}) {
    StoreUser a(hasty_options({endpoint}));
    EXPECT_EQ(a.swap(0, "text").type, Type::kUnknown);
    EXPECT_GT(log.count("etcd at " + endpoint), 0U) << log.text();
  }
}

}  // namespace
}  // namespace cohort::membership
