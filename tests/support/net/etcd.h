#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/threads/wait.h"
#include "tests/support/net/port.h"
#include "tests/support/processes/process_state.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"

namespace cohort::test {

/// Debian's etcd: ./test unpacks it into .cohort/programs. Throws where there is none: its tests fail then.
inline std::string etcd_program() {
  std::vector<std::filesystem::path> places{source_dir() / ".cohort/programs/usr/bin", "/usr/bin",
                                            "/usr/local/bin"};
  if (const char* const folder = std::getenv("COHORT_ETCD_FOLDER")) places.insert(places.begin(), folder);
  for (const std::filesystem::path& place : places) {
    if (std::filesystem::exists(place / "etcd")) return place / "etcd";
  }
  throw std::runtime_error(
      "there is no etcd here, and this test needs it: ./test --setup-only unpacks it (package etcd-server)");
}

/// Members of a cluster of etcd, as processes with data in a temporary folder. Killed when this goes.
class EtcdCluster {
 public:
  using Arguments = std::vector<std::string>;

  /// Where members are, each on a host of its own.
  struct Places {
    std::vector<std::string> addresses;
    /// Calls a function that starts a member on its host.
    std::function<void(int member, const std::function<void()>& start)> enter;
  };

  /// On the loopback. `more`: arguments for each member. `scheme` of clients: "http" or "https".
  explicit EtcdCluster(int num_members = 1, Arguments more = {}, std::string scheme = "http")
      : program_(etcd_program()), more_(std::move(more)), scheme_(std::move(scheme)) {
    for (int i = 0; i < num_members; ++i) members_.push_back({"127.0.0.1", free_port(), free_port(), -1});
    for (int i = 0; i < num_members; ++i) start(i);
  }
  explicit EtcdCluster(Places places)
      : program_(etcd_program()), scheme_("http"), enter_(std::move(places.enter)) {
    for (std::string& address : places.addresses) members_.push_back({std::move(address), 2379, 2380, -1});
    for (int i = 0; i < size(); ++i) start(i);
  }
  ~EtcdCluster() {
    for (int i = 0; i < size(); ++i) kill(i);
  }
  EtcdCluster(const EtcdCluster&) = delete;
  EtcdCluster& operator=(const EtcdCluster&) = delete;

  int size() const { return static_cast<int>(members_.size()); }
  std::uint16_t port(int i) const { return member(i).client_port; }
  std::string endpoint(int i) const { return member(i).address + ":" + std::to_string(port(i)); }
  std::vector<std::string> endpoints() const {
    std::vector<std::string> all;
    for (int i = 0; i < size(); ++i) all.push_back(endpoint(i));
    return all;
  }

  /// Starts a member, or one that was killed, with the data that it had.
  void start(int i) {
    const std::vector<std::string> words = command(i);
    std::vector<char*> arguments;
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    const std::string log = log_path(i);
    const pid_t parent = ::getpid();
    pid_t pid = -1;
    enter_(i, [&] {
      pid = ::fork();
      if (pid != 0) return;
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
      if (::getppid() != parent || out < 0 || ::dup2(out, 1) < 0 || ::dup2(out, 2) < 0) ::_exit(126);
      ::setenv("GOMAXPROCS", "1", 1);
      ::execv(arguments[0], arguments.data());
      ::_exit(127);
    });
    if (pid < 0) throw std::runtime_error("fork failed");
    members_.at(static_cast<std::size_t>(i)).pid = pid;
  }
  void kill(int i) {
    Member& killed = members_.at(static_cast<std::size_t>(i));
    if (killed.pid < 0) return;
    int status = 0;
    ::kill(killed.pid, SIGKILL);
    base::wait_for_process(killed.pid, status, base::Deadline(std::chrono::seconds(10)));
    killed.pid = -1;
  }
  void stop(int i) {
    ::kill(member(i).pid, SIGSTOP);
    base::poll_until([&] { return is_stopped(member(i).pid); }, base::Deadline(std::chrono::seconds(10)));
  }
  void resume(int i) { ::kill(member(i).pid, SIGCONT); }

  bool is_running(int i) const { return member(i).pid > 0 && !has_ended(member(i).pid); }
  std::string log(int i) const { return std::filesystem::exists(log_path(i)) ? read_file(log_path(i)) : ""; }

 private:
  struct Member {
    std::string address;
    std::uint16_t client_port, peer_port;
    pid_t pid;
  };
  const Member& member(int i) const { return members_.at(static_cast<std::size_t>(i)); }
  std::string log_path(int i) const { return folder_ / ("log " + std::to_string(i)); }
  std::string url(const std::string& scheme, int i, std::uint16_t port) const {
    return scheme + "://" + member(i).address + ":" + std::to_string(port);
  }

  std::vector<std::string> command(int i) const {
    std::string cluster;
    for (int k = 0; k < size(); ++k) {
      cluster += (k == 0 ? "m" : ",m") + std::to_string(k) + "=" + url("http", k, member(k).peer_port);
    }
    const std::string name = "m" + std::to_string(i), clients = url(scheme_, i, port(i)),
                      peers = url("http", i, member(i).peer_port);
    std::vector<std::string> words{program_,
                                   "--name=" + name,
                                   "--data-dir=" + (folder_ / name).string(),
                                   "--listen-client-urls=" + clients,
                                   "--advertise-client-urls=" + clients,
                                   "--listen-peer-urls=" + peers,
                                   "--initial-advertise-peer-urls=" + peers,
                                   "--initial-cluster=" + cluster,
                                   "--initial-cluster-token=" + folder_.path().filename().string(),
                                   "--heartbeat-interval=20",
                                   "--election-timeout=200"};
    words.insert(words.end(), more_.begin(), more_.end());
    return words;
  }

  const TempDir folder_;
  const std::string program_;
  const Arguments more_;
  const std::string scheme_;
  const std::function<void(int, const std::function<void()>&)> enter_ = [](int, const auto& start) {
    start();
  };
  std::vector<Member> members_;
};

}  // namespace cohort::test
