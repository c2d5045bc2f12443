// elastic_mlp_program STEPS VIRTUAL_RANKS HOST: trains the MLP of the elastic tests, alone or as a rank of
// `cohort run --elastic`. It tells what it does by files in FOLDER, and tests tell it there what to do:
//   steps           "STEP HASH" for each committed step, by process 0. A step may stand there twice
//   entered/        a file "GENERATION PROCESS NUM_PROCESSES HOST PID" for each entry, with the seconds since
//                   1970 as it sees them
//   ended/          a file "HOST PID" with the hash of the last state
//   fast            once it is there steps take no longer than they must; before, 40 ms at least, and the
//                   last third 400 ms: a test that is held up finds the run still there
//   begun/          a file HOST with 1,000,000 and the step that the rank of that host has begun last
//   points/         what the ranks of a host do at a point (tests/elastic/act_at_point.h)
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <stdexcept>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/internal/fault_points.h"
#include "cohort/elastic/session.h"
#include "tests/elastic/act_at_point.h"
#include "tests/elastic/mlp.h"

namespace {

using namespace cohort;
using base::concat;
using test::act_at_point;

constexpr int kStepMs = 40, kLateStepMs = 400;

class Notes {
 public:
  explicit Notes(std::string host) : folder_(std::getenv("FOLDER")), host_(std::move(host)) {
    std::filesystem::create_directories(folder_ / "begun");
    begun_ = ::open((folder_ / "begun" / host_).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  }

  void add_step(std::uint64_t steps, const std::string& bytes) const {
    const std::string line = concat(steps, " ", hash_of(bytes), "\n");
    // With O_APPEND lines of two processes are whole.
    const int file = ::open((folder_ / "steps").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0 || ::write(file, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
      throw std::runtime_error("cannot write steps");
    }
    ::close(file);
  }
  void add_entry(const elastic::GenerationInfo& info) const {
    write("entered",
          concat(info.generation, " ", info.process, " ", info.num_processes, " ", host_, " ", ::getpid()),
          std::to_string(std::time(nullptr)));
  }
  void add_end(const std::string& bytes) const {
    write("ended", concat(host_, " ", ::getpid()), hash_of(bytes));
  }
  bool is_fast() const { return ::access((folder_ / "fast").c_str(), F_OK) == 0; }

  void act_at(const char* point) const { act_at_point(folder_, host_, point, ::getppid()); }
  // With few digits and one write it is always whole.
  void note_begin(std::uint64_t step) const {
    const std::string text = std::to_string(1'000'000 + step);
    [[maybe_unused]] const ssize_t count = ::pwrite(begun_, text.data(), text.size(), 0);
  }

 private:
  static std::string hash_of(const std::string& bytes) {
    return std::to_string(std::hash<std::string>()(bytes));
  }
  // The name is there once the text is.
  void write(const char* folder, const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(folder_ / folder);
    const std::filesystem::path partial = folder_ / concat("partial ", ::getpid());
    std::ofstream(partial) << text;
    std::filesystem::rename(partial, folder_ / folder / name);
  }

  const std::filesystem::path folder_;
  const std::string host_;
  int begun_ = -1;  // until the process ends
};

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 4) throw std::runtime_error("got other arguments than STEPS VIRTUAL_RANKS HOST");
    const Notes notes(argv[3]);
    base::set_fault_hook([&](const char* point) { notes.act_at(point); });
    test::MlpRun run;
    run.session = elastic::session_of_process();
    run.total_steps = std::stoull(argv[1]);
    run.virtual_ranks = std::stoi(argv[2]);
    run.hidden = 16;
    run.on_enter = [&](const elastic::GenerationInfo& info) { notes.add_entry(info); };
    run.on_commit = [&](std::uint64_t steps, const auto& bytes) { notes.add_step(steps, bytes()); };
    run.before_step = [&](std::uint64_t step) {
      notes.note_begin(step);
      if (run.session == nullptr || notes.is_fast()) return;
      ::poll(nullptr, 0, step * 3 < run.total_steps * 2 ? kStepMs : kLateStepMs);
    };
    const std::string bytes = run_mlp(run);
    if (!bytes.empty()) notes.add_end(bytes);
    run.session.reset();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
