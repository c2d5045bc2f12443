// Options come from launch's table, so `cohort run` and PET_* in the environment cannot differ. The words are
// cut before CLI11 sees them: all from the first one on that is no option of ours is the user's program. This
// is done here, as CLI11 would read options after the program's name as its own. Every spelling of torchrun
// is accepted.
#include <ATen/detail/CUDAHooksInterface.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/text/nearest_name.h"
#include "cohort/cli/internal/commands.h"
#include "cohort/core/device.h"
#include "cohort/launch/read_options.h"
#include "cohort/launch/run.h"
#include "cohort/launch/run_flags.h"

namespace cohort::cli {
namespace {

struct RunArguments {
  std::map<std::string, std::string> values;
  std::map<std::string, bool> switches;
};

// Both spellings, as torchrun has them: --nproc-per-node,--nproc_per_node.
std::string names_of(const launch::RunFlag& flag) {
  std::string names = flag.letter != 0 ? std::string("-") + flag.letter + "," : "";
  names += "--" + flag.name;
  std::string other = flag.name;
  std::replace(other.begin(), other.end(), '-', '_');
  return other == flag.name ? names : names + ",--" + other;
}

[[noreturn]] void reject_option(const std::string& name) {
  std::vector<std::string> names;
  for (const launch::RunFlag& flag : launch::run_flags()) {
    if (flag.instead.empty()) names.push_back("--" + flag.name);
  }
  // CLI11's own message would come too late: an unknown option may take a value, so the cut could not
  // continue.
  const auto near = base::nearest_name(name, names);
  throw UsageError("cli.run",
                   base::concat("there is no option ", name, near ? "; did you mean " + *near + "?" : ""),
                   "cohort run --help; options of the program stand after it");
}

// How many words an option takes: itself, and its value when that is a word of its own.
std::size_t num_words(const std::string& word) {
  // These are CLI11's, in no table of ours.
  if (word == "-h" || word == "--help" || word == "--help-all") return 1;
  const bool is_long = word.starts_with("--");
  const std::size_t equals = is_long ? word.find('=') : std::string::npos;
  std::string name = word.substr(0, equals);
  // At least two characters: take_program() asks only for words longer than "-".
  std::replace(name.begin() + 2, name.end(), '_', '-');
  for (const launch::RunFlag& flag : launch::run_flags()) {
    if (is_long ? name != "--" + flag.name : word[1] != flag.letter) continue;
    // "--name=value" and "-n2" hold their value; "--name value" and "-n 2" are two words.
    const bool is_separate = is_long ? equals == std::string::npos : word.size() == 2;
    return is_separate && !flag.value.empty() ? 2 : 1;
  }
  reject_option(name);
}

int run_command(const RunArguments& arguments, const std::vector<std::string>& program) {
  // launch takes texts only; "1" stands for a switch that is on.
  std::map<std::string, std::string> given = arguments.values;
  for (const auto& [name, on] : arguments.switches) {
    if (on) given[name] = "1";
  }
  return start_job(launch::read_run_flags(given, program, num_gpus));
}

}  // namespace

int start_job(launch::RunOptions options) {
  ::signal(SIGCHLD, SIG_DFL);  // ignored by who started this one, it would take the ranks' statuses away
  // As process 1 of a container it inherits orphans of the ranks, and nobody else waits for them.
  options.reaps_orphans = ::getpid() == 1;
  return launch::run_job(options);
}

int num_gpus() {
  try {
    // A GPU that does not answer counts as none, as for train.device.
    core::resolve_device("cuda");
  } catch (const Error&) {
    return 0;
  }
  return at::detail::getCUDAHooks().getNumGPUs();
}

std::vector<std::string> take_program(std::vector<std::string>& words) {
  if (words.empty() || words.front() != "run") return {};
  std::size_t at = 1;
  while (at < words.size() && words[at].size() > 1 && words[at].front() == '-' && words[at] != "--") {
    at += num_words(words[at]);
  }
  // An option at the end whose value is missing has counted one word too many; CLI11 then says what is
  // missing.
  at = std::min(at, words.size());
  const auto begin = words.begin() + static_cast<std::ptrdiff_t>(at);
  std::vector<std::string> program(begin, words.end());
  words.erase(begin, words.end());
  // Only the first "--" is ours. A second one belongs to the program.
  if (!program.empty() && program.front() == "--") program.erase(program.begin());
  return program;
}

void add_run(CLI::App& app, Context& context) {
  auto arguments = std::make_shared<RunArguments>();
  CLI::App* command = app.add_subcommand("run",
                                         "[OPTIONS] -- PROGRAM [ARGUMENTS]...: run it in several processes, "
                                         "ranks that find torchrun's environment");
  for (const launch::RunFlag& flag : launch::run_flags()) {
    CLI::Option* option = nullptr;
    const std::string name = flag.name;
    if (flag.value.empty()) {
      option = command->add_flag_function(
          names_of(flag), [arguments, name](std::int64_t) { arguments->switches[name] = true; },
          flag.meaning);
    } else {
      option = command->add_option_function<std::string>(
          names_of(flag), [arguments, name](const std::string& value) { arguments->values[name] = value; },
          flag.meaning);
      // As with torchrun, the last value counts: scripts append to a command that is fixed.
      option->type_name(flag.value)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    }
    if (!flag.instead.empty()) option->group("");  // known, rejected by name, not in the help
  }
  command->footer(
      "Examples:\n"
      "  cohort run --nproc-per-node 2 -- ./train --epochs 3\n"
      "  cohort run --nproc-per-node auto -- python train.py\n"
      "  cohort run --nproc-per-node 4 --log-dir logs --tee 3 --max-restarts 2 -- ./train\n"
      "  two nodes, the same on both but for --node-rank:\n"
      "  cohort run --nnodes 2 --node-rank 0 --master-addr n1 --master-port 29500 --nproc-per-node 8 -- "
      "./train\n"
      "  two to four nodes, which may come and go, the same on all:\n"
      "  cohort run --nnodes 2:4 --rdzv-endpoint n1:29400 --secret-file job.secret -- ./train\n"
      "Each option can be given as PET_NAME in the environment too: PET_NPROC_PER_NODE=2.\n"
      "CTRL-C is passed on to each rank once; a second one kills them. The exit status is that of the rank "
      "that\n"
      "failed first. More: docs/guide/launch.md");
  command->callback([arguments, &context] {
    context.action = [arguments, &context] { return run_command(*arguments, context.rest); };
  });
}

}  // namespace cohort::cli
