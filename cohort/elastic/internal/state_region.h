#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/elastic/internal/region_file.h"
#include "cohort/elastic/session.h"

namespace cohort::elastic {

/// A process's state in memory that its agent holds: the next process in its place continues from there.
///
/// Tensors that StateSnapshot::in_place names are moved there once, under all their aliases; text and all
/// other tensors are copied at each commit. Where there is no memory the log says so once, and nothing is
/// held any more. Threads: one caller.
class StateRegion {
 public:
  /// Throws: SystemError where another process has the file.
  explicit StateRegion(base::Fd file);
  ~StateRegion();

  /// What the process before has left.
  CommitWord found() const { return found_; }
  /// Its state. The tensors lie in the region, or are copies. Nothing where there is none, or it cannot be
  /// read: the log says why.
  std::optional<StateSnapshot> read();
  /// It is of no use.
  void forget();

  /// Tensors move there ahead of the first commit. The region has no state all the same.
  void prepare(const StateSnapshot& state);
  /// The state is that after so many steps, and stays so until mark_changing(). Tensors that are new to the
  /// region move there, and never again.
  void commit(std::uint64_t steps, const StateSnapshot& state);
  /// The state is changed from here on, until commit(). `steps`: what it will be then.
  void mark_changing(std::uint64_t steps);

 private:
  struct StoragePlace;
  struct Table;
  struct StorageLayout;
  bool fits(const StateSnapshot& state) const;
  std::optional<StoragePlace> find_equal(const StateSnapshot& state, std::size_t tensor);
  void move_in(const StateSnapshot& state);
  void write_record(std::uint64_t steps, const StateSnapshot& state);
  void give_up();

  std::unique_ptr<RegionFile> file_;  // null: nothing is held any more
  CommitWord found_;
  std::unique_ptr<Table> before_;                 // of the process before
  std::unique_ptr<Table> table_;                  // of the state as it was last
  std::vector<std::unique_ptr<Table>> replaced_;  // that the record may name until the next commit
};

}  // namespace cohort::elastic
