#include "cohort/net/internal/host.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "cohort/base/host.h"

namespace cohort::net {

std::string place_of_process() {
  std::array<char, 64> text{};
  const ssize_t size = ::readlink("/proc/self/ns/pid", text.data(), text.size() - 1);
  return base::machine_id() + " " +
         (size > 0 ? std::string(text.data(), static_cast<std::size_t>(size)) : "");
}

std::uint64_t begin_of(pid_t pid) {
  // "PID (NAME) STATE ...": the name may hold spaces and brackets. The 22nd field is the 20th behind it.
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const std::size_t end = line.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream fields(line.substr(end + 1));
  std::string field;
  for (int i = 0; i < 20; ++i) fields >> field;
  return fields ? std::strtoull(field.c_str(), nullptr, 10) : 0;
}

base::Fd watch_process(pid_t pid, std::uint64_t began) {
#ifdef SYS_pidfd_open
  base::Fd fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  // The number may have been given to another process: asked after the descriptor is there.
  if (fd.is_open() && began != 0 && begin_of(pid) == began) return fd;
#else
  static_cast<void>(pid);
  static_cast<void>(began);
#endif
  return base::Fd();
}

}  // namespace cohort::net
