#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "tests/cli/job.h"
#include "tests/support/environment.h"

namespace cohort::test {

class RunElasticTest : public ::testing::Test {
 protected:
  Job agent(std::vector<std::string> flags, std::vector<std::string> arguments = {}) {
    flags.insert(flags.end(),
                 {"--elastic", "--bind-to=none", "--shutdown-timeout=20", "--", COHORT_ELASTIC_PROGRAM});
    flags.insert(flags.end(), arguments.begin(), arguments.end());
    return Job(dir.path(), std::move(flags));
  }
  Job node(const std::string& nnodes, std::vector<std::string> more = {},
           std::vector<std::string> arguments = {}) {
    more.insert(more.end(), {"--nnodes=" + nnodes, "--rdzv-endpoint=127.0.0.1:" + port});
    return agent(std::move(more), std::move(arguments));
  }
  // The process that is this one of a generation, once it has entered.
  pid_t process_in(int generation, int process, int num_processes) {
    const auto file = dir / base::concat("in_", generation, "_", process, "_of_", num_processes);
    EXPECT_TRUE(comes(file)) << file;
    return std::filesystem::exists(file) ? std::stoi(read_file(file)) : 0;
  }
  // What a rank has found in its region.
  std::string region_of(pid_t rank) {
    const auto file = dir / base::concat("region_", rank);
    return comes(file) ? read_file(file) : "none";
  }
  static bool logs(const Job& job, const std::string& text) {
    return base::poll_until([&] { return job.err().find(text) != std::string::npos; },
                            base::Deadline(std::chrono::seconds(60)));
  }
  void let_end() { write_file(dir / "go", ""); }

  TempDir dir;
  const std::string port = std::to_string(free_port());
  ScopedEnv threads{"OMP_NUM_THREADS", "1"};
};

}  // namespace cohort::test
