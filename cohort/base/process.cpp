#include "cohort/base/process.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <sstream>

#include "cohort/base/error.h"

namespace cohort::base {

std::string process_start(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const std::size_t after_name = text.rfind(')');  // the name may hold spaces and parentheses
  if (after_name == std::string::npos) return "";
  std::istringstream fields(text.substr(after_name + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  return field;
}

Fd open_process(pid_t pid) {
#ifdef SYS_pidfd_open
  return Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#else
  static_cast<void>(pid);
  return Fd();
#endif
}

std::string describe_signal(int number) {
  return concat("signal ", number, " (", ::strsignal(number), ")");
}

}  // namespace cohort::base
