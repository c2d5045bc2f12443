// Texts with @NAME@ and @VERSION@ in them become the files of a new folder. The name is checked first, as it
// becomes part of C++ code, of CMake code and of paths: nothing in it ever needs quoting. A folder that is
// there is never written into.
#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/files/atomic_file.h"
#include "cohort/base/version.h"
#include "cohort/cli/internal/commands.h"
#include "cohort/cli/internal/new_files.h"

namespace cohort::cli {
namespace {

namespace fs = std::filesystem;

struct NewArguments {
  std::string name;
  std::string folder = ".";
  bool cuda = false;
};

/// The name becomes that of files, of C++ functions and of a namespace of LibTorch's.
void check_name(const std::string& name) {
  const auto fits = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; };
  // ASCII by hand: isalpha() would take letters of the locale, which C++ and CMake do not.
  const bool is_name = !name.empty() && name.front() >= 'a' && name.front() <= 'z' &&
                       std::all_of(name.begin(), name.end(), fits) && name.size() <= 64;
  // What C++, LibTorch or Cohort has taken, of what one might think of.
  constexpr std::array<std::string_view, 30> kTaken = {
      "aten",  "at",     "auto", "bool",      "break",  "c10",   "case",   "char", "class", "cohort",
      "const", "delete", "do",   "double",    "else",   "float", "for",    "if",   "int",   "long",
      "main",  "new",    "prim", "quantized", "return", "short", "static", "std",  "torch", "while"};
  const bool is_free = std::find(kTaken.begin(), kTaken.end(), name) == kTaken.end();
  if (is_name && is_free) return;
  throw UsageError(
      "cli.new",
      base::concat("got the name '", name, "', expected small letters, digits and _, a letter first",
                   is_name ? ", and none that C++ or LibTorch has taken" : ""),
      "scaled_square");
}

std::string filled_in(std::string_view text, const std::string& name) {
  // Major and minor only: a project made today builds with each later patch release.
  const std::string version(base::version());
  const std::pair<std::string_view, std::string> holes[] = {
      {"@NAME@", name}, {"@VERSION@", version.substr(0, version.rfind('.'))}};
  std::string result(text);
  for (const auto& [hole, value] : holes) {
    for (std::size_t at = result.find(hole); at != std::string::npos;
         // The search continues after what was put in, so that a value cannot be replaced again.
         at = result.find(hole, at + value.size())) {
      result.replace(at, hole.size(), value);
    }
  }
  return result;
}

/// Writes the files into a new folder, whose path it returns.
fs::path write(const std::vector<NewFile>& files, const NewArguments& arguments) {
  check_name(arguments.name);
  fs::path folder = fs::path(arguments.folder) / arguments.name;
  if (fs::exists(folder)) {
    throw UsageError("cli.new", base::concat(folder.string(), " is there already"),
                     "another name, or --dir FOLDER");
  }
  // The check above is a courtesy. Two calls at the same time may still meet; then one writes over equal
  // files.
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    throw SystemError("cli.new", base::concat("cannot make ", folder.string(), ": ", error.message()));
  for (const NewFile& file : files) {
    if (file.cuda && !arguments.cuda) continue;
    const fs::path path = folder / filled_in(file.name, arguments.name);
    base::write_file_atomically(path, filled_in(file.content, arguments.name));
    std::printf("%s\n", path.c_str());
  }
  return folder;
}

/// Where this program lies as PREFIX/bin/cohort or BUILD/apps/cohort, find_package finds Cohort in PREFIX or
/// BUILD.
fs::path prefix() {
  return fs::read_symlink("/proc/self/exe").parent_path().parent_path();
}

int new_operator(const NewArguments& arguments) {
  const fs::path folder = write(operator_files(), arguments);
  std::printf(
      "\nBuild and test it:\n  cmake -B build -S %s -DCMAKE_PREFIX_PATH=%s\n"
      "  cmake --build build && ctest --test-dir build\n"
      "Use it in a run:\n  cohort train --load build/lib%s.so ...\n",
      folder.c_str(), prefix().c_str(), arguments.name.c_str());
  return 0;
}

int new_project(const NewArguments& arguments) {
  // Commands are printed complete, with this build's own path: they work when they are copied into a shell.
  const fs::path folder = write(project_files(), arguments);
  const char* const name = arguments.name.c_str();
  std::printf(
      "\nBuild and train it:\n  cd %s\n  cmake -B build -DCMAKE_PREFIX_PATH=%s && cmake --build build\n"
      "  cohort train --load ./build/lib%s.so --config %s.yaml\n",
      folder.c_str(), prefix().c_str(), name, name);
  return 0;
}

}  // namespace

void add_new(CLI::App& app, Context& context) {
  auto arguments = std::make_shared<NewArguments>();
  CLI::App* command = app.add_subcommand("new", "Begin a project of your own");
  command->require_subcommand(1);
  const auto add = [&](const char* kind, const char* what) {
    CLI::App* const subcommand = command->add_subcommand(kind, what);
    subcommand
        ->add_option("name", arguments->name, "Of its files and its folder; small letters, digits and _")
        ->required();
    subcommand->add_option("--dir", arguments->folder, "Where the new folder comes")->capture_default_str();
    return subcommand;
  };
  CLI::App* project =
      add("project", "A model and a data set for `cohort train`: CMakeLists.txt, source, configuration");
  project->footer("Example:\n  cohort new project rings\nWhat the parts mean: docs/guide/plugins.md");
  project->callback(
      [arguments, &context] { context.action = [arguments] { return new_project(*arguments); }; });
  CLI::App* op = add("operator", "An operator: CMakeLists.txt, kernel with gradient, test");
  op->add_flag("--cuda", arguments->cuda, "With a CUDA kernel beside the C++ one");
  op->footer("Example:\n  cohort new operator scaled_square\nWhat the parts mean: docs/guide/ops.md");
  op->callback([arguments, &context] { context.action = [arguments] { return new_operator(*arguments); }; });
}

}  // namespace cohort::cli
