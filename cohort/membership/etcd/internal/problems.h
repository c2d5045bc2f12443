#pragma once

#include <map>
#include <string>

namespace cohort::membership::etcd {

/// What is wrong now: of a subject ("etcd at e1:2379") and an operation ("to read"). A change is logged, and
/// the same again is not, nor what another operation of the subject has met already.
class Problems {
 public:
  /// The operation has this problem from now on.
  void note(const std::string& subject, const std::string& operation, const std::string& problem);
  /// It has none.
  void clear(const std::string& subject, const std::string& operation);

 private:
  std::map<std::string, std::map<std::string, std::string>> problems_;  // by subject, then by operation
};

}  // namespace cohort::membership::etcd
