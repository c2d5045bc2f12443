#pragma once

#include <fcntl.h>
#include <sys/resource.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "cohort/base/files/fd.h"

namespace cohort::test {

/// While it is there, this process can have only so many more descriptors. Sanitizers need some themselves.
class FewDescriptors {
 public:
  explicit FewDescriptors(std::size_t num) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit few{512, before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &few);
    base::Fd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    for (; fd.is_open(); fd = base::Fd(::fcntl(taken_.front().get(), F_DUPFD_CLOEXEC, 0)))
      taken_.push_back(std::move(fd));
    taken_.resize(taken_.size() - num);
  }
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
  std::vector<base::Fd> taken_;
};

}  // namespace cohort::test
