#include "cohort/data/partial_folder.h"

#include <system_error>

#include "cohort/core/error.h"

namespace cohort::data {

namespace fs = std::filesystem;

PartialFolder::PartialFolder(const std::string& final) {
  std::error_code error;
  final_ = fs::path(final);
  if (!final_.has_filename()) final_ = final_.parent_path();  // a slash at the end
  if (fs::exists(final_, error) && !(fs::is_directory(final_, error) && fs::is_empty(final_, error))) {
    throw DataError("data.tools", final + " exists already", "another folder, or remove it");
  }
  partial_ = final_;
  partial_ += ".partial";
  fs::remove_all(partial_, error);
  if (!error) fs::create_directories(partial_, error);
  if (error)
    throw SystemError("data.tools", core::concat("cannot make ", partial_.string(), ": ", error.message()));
}

PartialFolder::~PartialFolder() {
  std::error_code ignored;
  if (!finished_) fs::remove_all(partial_, ignored);
}

void PartialFolder::finish() {
  std::error_code error;
  fs::rename(partial_, final_, error);  // replaces an empty folder
  if (error) {
    throw SystemError("data.tools", core::concat("cannot rename ", partial_.string(), ": ", error.message()));
  }
  finished_ = true;
}

}  // namespace cohort::data
