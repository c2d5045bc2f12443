// The store against Debian's etcd, which each test starts on the loopback.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <random>

#include "cohort/base/error.h"
#include "cohort/membership/etcd/internal/base64.h"
#include "cohort/membership/member.h"
#include "tests/membership/store_user.h"
#include "tests/net/relay.h"
#include "tests/support/contains.h"
#include "tests/support/net/certificates.h"
#include "tests/support/net/etcd.h"
#include "tests/support/net/http.h"

namespace cohort::membership {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using test::comes_true;
using test::contains;
using test::EtcdCluster;
using test::LogLines;
using test::StoreUser;
using Type = StoreAnswer::Type;

constexpr const char* kKey = "/cohort/membership/none";

// A busy host takes a while.
EtcdOptions options_of(const EtcdCluster& etcd) {
  EtcdOptions options;
  options.endpoints = etcd.endpoints();
  options.request_timeout = milliseconds(5'000);
  options.swap_timeout = milliseconds(20'000);
  return options;
}
EtcdOptions hasty_options_of(const EtcdCluster& etcd) {
  EtcdOptions options = options_of(etcd);
  options.request_timeout = milliseconds(200);
  options.swap_timeout = milliseconds(300);
  return options;
}

// What an administrator does. Waits until etcd has begun.
json ask(const EtcdCluster& etcd, const std::string& path, const json& body, const std::string& token = "") {
  std::string text;
  const bool answers = comes_true([&] {
    try {
      text = test::http_post(etcd.port(0), "/v3" + path, body.dump(), token);
      return !contains(text, "no leader");
    } catch (const std::runtime_error&) {
      return false;
    }
  });
  if (!answers) throw std::runtime_error("etcd does not answer: " + etcd.log(0));
  return json::parse(text);
}
json key_of_record() {
  return {{"key", etcd::encode_base64(kKey)}};
}

TEST(EtcdStoreTest, SwapsConflictsAndChangesAreTold) {
  EtcdCluster etcd;
  StoreUser a(options_of(etcd)), b(options_of(etcd));
  EXPECT_EQ(a.read().revision, 0U);
  const StoreAnswer first = a.swap(0, "first");
  EXPECT_EQ(first.type, Type::kSwapped);
  EXPECT_EQ(first.text, "first");
  EXPECT_EQ(b.wait_for_record("first").revision, first.revision);
  const StoreAnswer conflict = b.swap(0, "second");
  EXPECT_EQ(conflict.type, Type::kConflict);
  EXPECT_EQ(conflict.text, "first");
  EXPECT_EQ(conflict.revision, first.revision);
  const std::string all_bytes("\0\xff\n\"\xc3", 5);
  EXPECT_EQ(b.swap(first.revision, all_bytes).type, Type::kSwapped);
  EXPECT_GT(a.wait_for_record(all_bytes).revision, first.revision);
  EXPECT_EQ(a.swap(first.revision, "third").type, Type::kConflict);
  // Another run's record is another one.
  EtcdOptions other = options_of(etcd);
  other.run_id = "another";
  StoreUser c(other);
  EXPECT_EQ(c.read().revision, 0U);
}

TEST(EtcdStoreTest, ARandomProgramOfTwoSeesOneOrder) {
  EtcdCluster etcd;
  StoreUser a(options_of(etcd)), b(options_of(etcd));
  StoreUser* const users[] = {&a, &b};
  std::mt19937 random(11);
  std::map<std::uint64_t, std::string> written;
  std::uint64_t newest = 0;
  for (int i = 0; i < 60; ++i) {
    StoreUser& user = *users[random() % 2];
    const bool is_old = random() % 3 == 0 && newest > 0;
    const std::string text = "text " + std::to_string(i) + std::string(random() % 5'000, 'x');
    const StoreAnswer answer = user.swap(is_old ? newest - 1 : newest, text);
    ASSERT_EQ(answer.type, is_old ? Type::kConflict : Type::kSwapped) << i;
    if (is_old) {
      EXPECT_EQ(answer.text, written.at(newest));
    } else {
      EXPECT_GT(answer.revision, newest);
      newest = answer.revision;
      written[newest] = text;
    }
  }
  for (StoreUser* const user : users) {
    EXPECT_EQ(user->read().text, written.at(newest));
    std::uint64_t told = 0;
    for (const StoreAnswer& answer : user->answers()) {
      if (answer.revision == 0) continue;
      EXPECT_EQ(answer.text, written.at(answer.revision));
      EXPECT_GE(answer.revision, told) << "changes are told in their order";
      told = answer.revision;
    }
  }
}

// An agent without ranks: it enters each generation at once.
struct EtcdAgent {
  explicit EtcdAgent(const EtcdOptions& etcd) : member(options_with(etcd)) {}
  static MemberOptions options_with(const EtcdOptions& etcd) {
    MemberOptions options;
    options.settings.max_nodes = 3;
    options.settings.virtual_ranks = 8;
    options.store = make_etcd_store(etcd);
    return options;
  }
  bool sees_members(std::size_t count) {
    return comes_true([&] {
      const MemberView view = member.view();
      if (view.is_member() && view.record->generation.number != status.entered) {
        status.entered = status.recovered = view.record->generation.number;
        member.set_status(status);
      }
      return view.is_member() && view.record->generation.members.size() == count;
    });
  }
  Member member;
  MemberStatus status;
};

TEST(EtcdStoreTest, AgentsAgreeWhileAMemberOfEtcdAndTheDecidingAgentDie) {
  EtcdCluster etcd(3);
  const LogLines log;
  std::vector<std::unique_ptr<EtcdAgent>> agents;
  agents.push_back(std::make_unique<EtcdAgent>(options_of(etcd)));
  ASSERT_TRUE(agents[0]->sees_members(1)) << log.text() << etcd.log(0);
  agents.push_back(std::make_unique<EtcdAgent>(options_of(etcd)));
  for (const auto& agent : agents) ASSERT_TRUE(agent->sees_members(2)) << log.text() << etcd.log(0);
  etcd.kill(0);  // the one that they talk to
  agents.push_back(std::make_unique<EtcdAgent>(options_of(etcd)));
  for (const auto& agent : agents) ASSERT_TRUE(agent->sees_members(3)) << log.text();
  EXPECT_GT(log.count("etcd at " + etcd.endpoint(0)), 0U) << log.text();
  const auto deciding = std::find_if(agents.begin(), agents.end(),
                                     [](const auto& agent) { return agent->member.view().is_deciding; });
  ASSERT_NE(deciding, agents.end());
  agents.erase(deciding);
  for (const auto& agent : agents) ASSERT_TRUE(agent->sees_members(2)) << log.text();
  EXPECT_EQ(agents[0]->member.view().record->generation, agents[1]->member.view().record->generation);
}

TEST(EtcdStoreTest, AnAgentOfAnEarlierRunHasNoPartInTheNext) {
  EtcdCluster etcd;
  const LogLines log;
  EtcdAgent agent(options_of(etcd));
  ASSERT_TRUE(agent.sees_members(1)) << log.text();
  ask(etcd, "/kv/deleterange", key_of_record());
  StoreUser next(options_of(etcd));
  ASSERT_EQ(next.swap(next.read().revision, to_text(RendezvousRecord())).type, Type::kSwapped);
  EXPECT_TRUE(comes_true([&] { return !agent.member.view().failure.empty(); }));
  EXPECT_EQ(agent.member.view().failure, "the record is of another run by now");
}

TEST(EtcdStoreTest, WhileEtcdIsStoppedASwapIsUnknownAndThenTheRecordIsTold) {
  EtcdCluster etcd;
  const LogLines log;
  StoreUser a(hasty_options_of(etcd)), patient(options_of(etcd));
  const StoreAnswer first = patient.swap(0, "first");
  ASSERT_EQ(first.type, Type::kSwapped);
  a.wait_for_record("first");
  etcd.stop(0);
  const std::size_t logged = log.count("no answer in time");
  const auto begin = std::chrono::steady_clock::now();
  const std::size_t told = a.num_answers();
  EXPECT_EQ(a.swap(first.revision, "second").type, Type::kUnknown);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(300));
  EXPECT_EQ(a.swap(first.revision, "second").type, Type::kUnknown);
  EXPECT_EQ(log.count("no answer in time"), logged + 1) << "once for each change:\n" << log.text();
  etcd.resume(0);
  // What was made of it is known as soon as etcd answers.
  const StoreAnswer after =
      a.wait_for(told, [](const StoreAnswer& answer) { return answer.type == Type::kRecord; });
  EXPECT_TRUE(after.text == "first" || after.text == "second") << after.text;
  EXPECT_TRUE(log.come_to_have("all is well again"));
}

TEST(EtcdStoreTest, AStoppedMemberOfThreeIsPassedOver) {
  EtcdCluster etcd(3);
  EtcdOptions options = options_of(etcd);
  options.request_timeout = milliseconds(200);
  StoreUser a(options), b(options);
  StoreAnswer last = a.swap(0, "first");
  ASSERT_EQ(last.type, Type::kSwapped);
  b.wait_for_record("first");
  etcd.stop(0);  // both watch it
  last = a.swap(last.revision, "second");
  ASSERT_EQ(last.type, Type::kSwapped);
  EXPECT_EQ(b.wait_for_record("second").revision, last.revision);
}

TEST(EtcdStoreTest, EtcdThatStartsLaterIsFound) {
  EtcdCluster etcd;
  etcd.kill(0);
  const LogLines log;
  EtcdOptions options = options_of(etcd);
  const test::Port closed(test::Port::Use::kRejects);
  options.endpoints.insert(options.endpoints.begin(), "127.0.0.1:" + closed.text());
  StoreUser a(options);
  EXPECT_TRUE(log.come_to_have("etcd at " + etcd.endpoint(0) + ", to read: Couldn't connect")) << log.text();
  EXPECT_TRUE(log.come_to_have("etcd at " + options.endpoints[0])) << log.text();
  etcd.start(0);
  EXPECT_EQ(a.read().revision, 0U);
  EXPECT_EQ(log.count(options.endpoints[0] + ", to read"), 1U) << log.text();
}

TEST(EtcdStoreTest, AnotherClusterIsRejected) {
  EtcdCluster first, second;
  for (const EtcdCluster* const etcd : {&first, &second}) ask(*etcd, "/kv/range", key_of_record());
  const LogLines log;
  EtcdOptions options = options_of(first);
  options.endpoints.push_back(second.endpoint(0));
  StoreUser a(options);
  ASSERT_EQ(a.swap(0, "text").type, Type::kSwapped);
  first.kill(0);
  EXPECT_TRUE(log.come_to_have("belongs to another cluster")) << log.text();
  first.start(0);
  EXPECT_EQ(a.read().text, "text");
}

TEST(EtcdStoreTest, AFullEtcdIsNamedAndMayBeRead) {
  EtcdCluster etcd(1, {"--quota-backend-bytes=200000"});
  const LogLines log;
  EtcdOptions hasty_options = options_of(etcd);
  hasty_options.swap_timeout = milliseconds(1'000);
  StoreUser a(options_of(etcd)), hasty(hasty_options);
  const StoreAnswer first = a.swap(0, "first");
  ASSERT_EQ(first.type, Type::kSwapped);
  const json large = {{"key", etcd::encode_base64("/x")},
                      {"value", etcd::encode_base64(std::string(100'000, 'x'))}};
  ASSERT_TRUE(comes_true([&] { return contains(ask(etcd, "/kv/put", large).dump(), "space exceeded"); }));
  EXPECT_EQ(hasty.swap(first.revision, "second").type, Type::kUnknown);
  EXPECT_EQ(log.count("etcd, to write: etcdserver: mvcc: database space exceeded. Try: etcd is full"), 1U)
      << log.text();
  EXPECT_EQ(a.read().text, "first");
}

TEST(EtcdStoreTest, AfterACompactionTheRecordIsReadAnew) {
  EtcdCluster etcd;
  auto relay = std::make_unique<test::Relay>(etcd.endpoint(0));
  EtcdOptions options = options_of(etcd);
  const std::string address = relay->address();
  options.endpoints = {address};
  StoreUser a(options), direct(options_of(etcd));
  StoreAnswer last = direct.swap(0, "0");
  a.wait_for_record("0");
  relay.reset();
  for (int i = 1; i < 6; ++i) last = direct.swap(last.revision, std::to_string(i));
  ask(etcd, "/kv/compaction", {{"revision", std::to_string(last.revision)}});
  relay = std::make_unique<test::Relay>(etcd.endpoint(0), address);
  EXPECT_EQ(a.wait_for_record("5").revision, last.revision);
  last = direct.swap(last.revision, "6");
  EXPECT_EQ(a.wait_for_record("6").revision, last.revision) << "it watches again";
}

TEST(EtcdStoreTest, TheRecordOfARunThatHasEndedHasALease) {
  EtcdCluster etcd;
  StoreUser a(options_of(etcd));
  RendezvousRecord record;
  const StoreAnswer first = a.swap(0, to_text(record));
  ASSERT_EQ(first.type, Type::kSwapped);
  EXPECT_FALSE(ask(etcd, "/kv/range", key_of_record()).at("kvs").at(0).contains("lease"));
  record.state = RunState::kSucceeded;
  ASSERT_EQ(a.swap(first.revision, to_text(record)).type, Type::kSwapped);
  const json pair = ask(etcd, "/kv/range", key_of_record()).at("kvs").at(0);
  ASSERT_TRUE(pair.contains("lease"));
  const json lease = ask(etcd, "/kv/lease/timetolive", {{"ID", pair.at("lease")}});
  EXPECT_EQ(lease.at("grantedTTL"), "60");
}

TEST(EtcdStoreTest, ARecordThatIsDeletedIsNamed) {
  EtcdCluster etcd;
  const LogLines log;
  StoreUser a(options_of(etcd));
  const StoreAnswer first = a.swap(0, "first");
  ask(etcd, "/kv/deleterange", key_of_record());
  EXPECT_TRUE(log.come_to_have("/cohort/membership/none was deleted")) << log.text();
  EXPECT_EQ(a.swap(first.revision, "second").type, Type::kConflict);
  EXPECT_EQ(log.count("was deleted"), 1U);
}

// etcd with authentication, a user `u` for keys below /cohort/, and files of passwords.
class EtcdAuthTest : public testing::Test {
 protected:
  EtcdAuthTest() {
    write_password("right", "word");
    write_password("wrong", "another");
    for (const char* const name : {"root", "u"})
      ask(etcd_, "/auth/user/add", {{"name", name}, {"password", "word"}});
    for (const char* const name : {"root", "r"}) ask(etcd_, "/auth/role/add", {{"name", name}});
    ask(etcd_, "/auth/role/grant",
        {{"name", "r"},
         {"perm",
          {{"permType", "READWRITE"},
           {"key", etcd::encode_base64("/cohort/")},
           {"range_end", etcd::encode_base64("/cohort0")}}}});
    ask(etcd_, "/auth/user/grant", {{"user", "root"}, {"role", "root"}});
    ask(etcd_, "/auth/user/grant", {{"user", "u"}, {"role", "r"}});
    ask(etcd_, "/auth/enable", json::object());
  }
  void write_password(const char* name, const char* password) {
    test::write_file(folder_ / name, std::string(password) + "\n");
    ::chmod((folder_ / name).c_str(), 0600);
  }
  EtcdOptions options_with(const char* password) {
    EtcdOptions options = options_of(etcd_);
    options.user = "u";
    options.password_file = folder_ / password;
    return options;
  }

  const test::TempDir folder_;
  EtcdCluster etcd_;
};

TEST_F(EtcdAuthTest, AUserLogsInAndAgainWhenTheTokenIsOld) {
  const LogLines log;
  StoreUser a(options_with("right")), b(options_with("right"));
  StoreAnswer last = a.swap(0, "first");
  ASSERT_EQ(last.type, Type::kSwapped) << log.text();
  EXPECT_EQ(b.wait_for_record("first").revision, last.revision);
  // A member that starts again knows no token of before.
  etcd_.kill(0);
  etcd_.start(0);
  ASSERT_EQ(a.read().text, "first");
  ASSERT_TRUE(comes_true([&] { return (last = a.swap(last.revision, "second")).type == Type::kSwapped; }));
  EXPECT_EQ(b.wait_for_record("second").revision, last.revision) << log.text();
}

TEST_F(EtcdAuthTest, WhoMayNotIsTold) {
  const LogLines log;
  StoreUser wrong(options_with("wrong"));
  EXPECT_TRUE(log.come_to_have("etcd, to log in: etcdserver: authentication failed")) << log.text();
  StoreUser none(options_of(etcd_));
  EXPECT_TRUE(
      log.come_to_have("etcd, to read: etcdserver: user name is empty. Try: a user and a password file"))
      << log.text();
  EtcdOptions elsewhere = options_with("right");
  elsewhere.prefix = "/secret/";
  StoreUser denied(elsewhere);
  EXPECT_TRUE(log.come_to_have("etcd, to read: etcdserver: permission denied")) << log.text();
  // The right password is in the file later.
  write_password("wrong", "word");
  EXPECT_EQ(wrong.read().revision, 0U);
}

TEST(EtcdTlsTest, CertificatesOfBothSidesAreChecked) {
  const test::Authority authority, stranger("stranger");
  const net::TlsOptions server = authority.make_node("127.0.0.1"), client = authority.make_node("client");
  EtcdCluster etcd(1,
                   {"--cert-file=" + server.certificate.string(), "--key-file=" + server.key.string(),
                    "--client-cert-auth", "--trusted-ca-file=" + authority.file().string()},
                   "https");
  const LogLines log;
  EtcdOptions options = options_of(etcd);
  options.is_tls = true;
  options.authorities = authority.file();
  options.certificate = client.certificate;
  options.key = client.key;
  StoreUser a(options), b(options);
  const StoreAnswer first = a.swap(0, "first");
  ASSERT_EQ(first.type, Type::kSwapped) << log.text() << etcd.log(0);
  EXPECT_EQ(b.wait_for_record("first").revision, first.revision);
  EXPECT_EQ(log.count("certificate"), 0U) << log.text();

  EtcdOptions without = options;
  without.certificate = without.key = "";
  StoreUser c(without);
  EXPECT_TRUE(log.come_to_have("Try: ssl_cert and ssl_cert_key that etcd accepts")) << log.text();
  EtcdOptions suspicious = options;
  suspicious.authorities = stranger.file();
  StoreUser d(suspicious);
  EXPECT_TRUE(log.come_to_have("Try: ca_cert, the authority of etcd's certificate")) << log.text();
  EtcdOptions plain = options_of(etcd);
  StoreUser e(plain);
  EXPECT_TRUE(log.come_to_have("Try: protocol=https")) << log.text();
}

}  // namespace
}  // namespace cohort::membership
