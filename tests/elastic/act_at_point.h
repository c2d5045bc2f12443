#pragma once

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace cohort::test {

/// At a point of a rank or of its agent: does once what the file "points/HOST POINT" in the folder says, if
/// there is one: "kill rank", "stop rank", "kill agent", "stop agent". Whoever does it removes the file.
/// `agent`: of this process, which may be it itself.
inline void act_at_point(const std::filesystem::path& folder, const std::string& host, const char* point,
                         pid_t agent) {
  const std::filesystem::path file = folder / "points" / (host + " " + point);
  if (::access(file.c_str(), F_OK) != 0) return;
  std::ifstream stream(file);
  const std::string action{std::istreambuf_iterator<char>(stream), {}};
  if (::unlink(file.c_str()) != 0) return;  // another process does it
  const int signal = action.starts_with("kill") ? SIGKILL : SIGSTOP;
  ::kill(action.ends_with("agent") ? agent : ::getpid(), signal);
  // An agent's end is this process's.
  if (action == "kill agent") ::poll(nullptr, 0, 10'000);
}

}  // namespace cohort::test
