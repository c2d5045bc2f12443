#include "mlp_process.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>

#include "cohort/base/env.h"
#include "tests/elastic/mlp.h"
#include "zygote.h"

namespace cohort::test {
namespace {

void append_line(const std::string& path, const std::string& line) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0 || ::write(file, line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
  ::close(file);
}

}  // namespace

int run_mlp_child() {
  try {
    stop_at_test_point();
    const std::string folder = *base::env_string("TEST_FOLDER");
    MlpRun run;
    elastic::SessionOptions options;
    options.chunk_bytes = static_cast<std::uint64_t>(*base::env_int("TEST_CHUNK_BYTES"));
    run.session = elastic::session_of_process(options);
    run.virtual_ranks = run.session->virtual_ranks();
    run.bucket_bytes = *base::env_int("TEST_BUCKET_BYTES");
    run.total_steps = static_cast<std::uint64_t>(*base::env_int("TEST_STEPS"));
    run.hidden = static_cast<int>(base::env_int("TEST_HIDDEN").value_or(run.hidden));
    run.on_commit = [ledger = folder + "/ledger"](std::uint64_t committed, const auto&) {
      append_line(ledger, std::to_string(committed) + "\n");
    };
    const std::string bytes = run_mlp(run);
    if (!bytes.empty())
      std::ofstream(folder + "/result " + std::to_string(::getpid()), std::ios::binary) << bytes;
    run.session.reset();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "child failed: " << error.what() << std::endl;
    return 1;
  }
}

}  // namespace cohort::test
