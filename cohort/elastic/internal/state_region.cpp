// A tensor moves by its storage: the storage gets other memory, and all tensors and views over it see that.
// So nobody who holds a tensor notices, and a step copies nothing. Whoever holds a pointer would notice, so
// tensors move before they are first given to others, and never while they are in use.
//
// Only tensors that the state's owner has named move, as those that change between begin_changes() and
// commit() alone. A region that says "committed" must not have running statistics that a later step has
// touched: they are copied at each commit. So is what only the snapshot holds, for it is made anew each time.
//
// A record has the text, the copies, and a table: which memory of the file has which tensor. The next process
// maps that memory, and gives the tensors to StateAccess::load. What load has copied is compared with the
// region, and moves there without another copy.
#include "cohort/elastic/internal/state_region.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/internal/fault_points.h"
#include "cohort/base/log.h"
#include "cohort/base/text/bounded_json.h"

namespace cohort::elastic {
namespace {

using base::concat;
using nlohmann::json;

constexpr const char* kWhereHeld = "elastic.region";
constexpr std::uint64_t kAlignment = 64;  // as LibTorch's own
constexpr int kNotInPlace = -1;

// The sizes of the three parts of a record, in front of them.
struct RecordSizes {
  std::uint64_t table = 0, text = 0, copies = 0;
};

std::uint64_t aligned(std::uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// As it lies in a record.
at::Tensor dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}

std::span<const std::byte> bytes_of_tensor(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), static_cast<std::size_t>(tensor.nbytes())};
}

// The memory of a storage that lives in a region.
at::DataPtr pointer_into(const std::shared_ptr<RegionBytes>& memory, std::uint64_t begin) {
  auto* const owner = new std::shared_ptr<RegionBytes>(memory);
  return {memory->data() + begin, owner,
          [](void* context) { delete static_cast<std::shared_ptr<RegionBytes>*>(context); },
          at::Device(at::kCPU)};
}

// Why a state cannot be held; empty: it can.
std::string reason_against(const StateSnapshot& state) {
  if (state.in_place.size() != state.tensors.size()) {
    return "its StateAccess does not say which tensors may lie there (StateSnapshot::in_place)";
  }
  for (const at::Tensor& tensor : state.tensors) {
    if (!tensor.is_cpu() || tensor.layout() != at::kStrided)
      return concat("it has a tensor on ", tensor.device().str(), ", or without strides");
  }
  return "";
}

void warn_of_memory(const Error& error) {
  base::log_warning(concat("the state is in no memory that outlives this process: ", base::message_of(error),
                           ". If the process dies another one has to give its successor the state"));
}

}  // namespace

struct StateRegion::StoragePlace {
  std::shared_ptr<RegionBytes> memory;
  std::uint64_t begin = 0, bytes = 0;
  bool is_taken = false;  // of the process before: by a storage of this one

  std::byte* data() const { return memory->data() + begin; }
};

/// Which memory of the file has which tensor.
struct StateRegion::Table {
  struct TensorPlace {
    int storage = kNotInPlace;
    std::int64_t offset = 0;
    std::vector<std::int64_t> sizes, strides;
    at::ScalarType type = at::kFloat;

    bool is_like(const at::Tensor& tensor) const {
      return tensor.sizes() == sizes && tensor.strides() == strides && tensor.scalar_type() == type;
    }
  };
  std::vector<StoragePlace> storages;
  std::vector<TensorPlace> tensors;
  std::string text = {};

  std::vector<std::shared_ptr<RegionBytes>> memories() const {
    std::vector<std::shared_ptr<RegionBytes>> list;
    for (const StoragePlace& place : storages) {
      if (std::ranges::find(list, place.memory) == list.end()) list.push_back(place.memory);
    }
    return list;
  }
  // What `next` does not use is given back as soon as no tensor lies there.
  void drop_all_but(const Table* next) const {
    const auto kept = next == nullptr ? std::vector<std::shared_ptr<RegionBytes>>{} : next->memories();
    for (const auto& memory : memories()) {
      if (std::ranges::find(kept, memory) == kept.end()) memory->drop();
    }
  }
  void write_text();
  static Table read(const json& list, const RegionFile& file);
};

void StateRegion::Table::write_text() {
  const auto list = memories();
  json memory = json::array(), places = json::array(), all = json::array();
  for (const auto& bytes : list) memory.push_back({bytes->offset(), bytes->bytes()});
  for (const StoragePlace& place : storages) {
    places.push_back({std::ranges::find(list, place.memory) - list.begin(), place.begin, place.bytes});
  }
  for (const TensorPlace& place : tensors) {
    all.push_back({place.storage, place.offset, place.sizes, place.strides, static_cast<int>(place.type)});
  }
  text = json{{"memory", memory}, {"storages", places}, {"tensors", all}}.dump();
}

// Throws: json::exception, Error for what does not fit.
StateRegion::Table StateRegion::Table::read(const json& list, const RegionFile& file) {
  Table table;
  std::vector<std::shared_ptr<RegionBytes>> memory;
  for (const json& entry : list.at("memory")) {
    memory.push_back(file.map(entry.at(0).get<std::uint64_t>(), entry.at(1).get<std::uint64_t>()));
  }
  for (const json& entry : list.at("storages")) {
    StoragePlace place{memory.at(entry.at(0).get<std::size_t>()), entry.at(1).get<std::uint64_t>(),
                       entry.at(2).get<std::uint64_t>()};
    if (place.begin > place.memory->bytes() || place.bytes > place.memory->bytes() - place.begin)
      throw DataError(kWhereHeld, "a tensor lies outside of its memory");
    table.storages.push_back(std::move(place));
  }
  for (const json& entry : list.at("tensors")) {
    TensorPlace place{
        entry.at(0).get<int>(), entry.at(1).get<std::int64_t>(), entry.at(2).get<std::vector<std::int64_t>>(),
        entry.at(3).get<std::vector<std::int64_t>>(), static_cast<at::ScalarType>(entry.at(4).get<int>())};
    table.tensors.push_back(std::move(place));
  }
  return table;
}

/// Storages of a state that are to lie in the region, and their tensors.
struct StateRegion::StorageLayout {
  explicit StorageLayout(const StateSnapshot& state);
  std::vector<std::vector<std::size_t>> groups;  // tensors, by storage
  std::vector<c10::StorageImpl*> storages;
};

StateRegion::StorageLayout::StorageLayout(const StateSnapshot& state) {
  std::map<c10::StorageImpl*, std::size_t> numbers;
  std::vector<std::vector<std::size_t>> all;
  for (std::size_t i = 0; i < state.tensors.size(); ++i) {
    const auto [number, is_new] =
        numbers.emplace(state.tensors[i].storage().unsafeGetStorageImpl(), all.size());
    if (is_new) all.emplace_back();
    all[number->second].push_back(i);
  }
  for (auto& group : all) {
    const at::Storage& storage = state.tensors[group.front()].storage();
    std::uint64_t used = 0;
    bool is_in_place = storage.nbytes() > 0 && storage.use_count() > group.size();
    for (const std::size_t i : group) {
      is_in_place = is_in_place && state.in_place[i];
      used += state.tensors[i].nbytes();
    }
    // A small piece of something large would take all of that along.
    if (!is_in_place || storage.nbytes() > 2 * used + kAlignment) continue;
    storages.push_back(storage.unsafeGetStorageImpl());
    groups.push_back(std::move(group));
  }
}

StateRegion::StateRegion(base::Fd file)
    : file_(std::make_unique<RegionFile>(std::move(file))), found_(file_->word()) {}

StateRegion::~StateRegion() = default;

// Tensors that have moved stay where they are.
void StateRegion::give_up() {
  file_->mark_empty();
  file_.reset();
}

std::optional<StateSnapshot> StateRegion::read() {
  const auto record = file_->record();
  try {
    if (!record || record->size() < sizeof(RecordSizes))
      throw DataError(kWhereHeld, "its record is not the one that was written");
    RecordSizes sizes;
    std::memcpy(&sizes, record->data(), sizeof sizes);
    const auto* const begin = reinterpret_cast<const char*>(record->data()) + sizeof sizes;
    const std::uint64_t left = record->size() - sizeof sizes;
    if (sizes.table > left || sizes.text > left - sizes.table ||
        sizes.copies != left - sizes.table - sizes.text)
      throw DataError(kWhereHeld, "its record has other sizes");
    const auto list = base::parse_bounded_json({begin, sizes.table});
    if (!list) throw DataError(kWhereHeld, "its table cannot be read");
    auto table = std::make_unique<Table>(Table::read(*list, *file_));
    StateSnapshot state;
    state.text.assign(begin + sizes.table, sizes.text);
    const char* copy = begin + sizes.table + sizes.text;
    std::uint64_t copies_left = sizes.copies;
    std::vector<at::Storage> storages;
    for (const auto& place : table->storages) {
      storages.emplace_back(at::Storage::use_byte_size_t(), static_cast<std::int64_t>(place.bytes),
                            pointer_into(place.memory, place.begin), nullptr, /*resizable=*/false);
    }
    for (const auto& place : table->tensors) {
      if (place.storage != kNotInPlace) {
        const at::Storage& storage = storages.at(static_cast<std::size_t>(place.storage));
        state.tensors.push_back(
            at::empty({0}, place.type).set_(storage, place.offset, place.sizes, place.strides));
        continue;
      }
      state.tensors.push_back(at::empty_strided(place.sizes, place.strides, place.type));
      const auto bytes = static_cast<std::uint64_t>(state.tensors.back().nbytes());
      if (bytes > copies_left) throw DataError(kWhereHeld, "its copies are too short");
      if (bytes > 0) std::memcpy(state.tensors.back().mutable_data_ptr(), copy, bytes);
      copy += bytes;
      copies_left -= bytes;
    }
    before_ = std::move(table);
    return state;
  } catch (const std::exception& error) {
    base::log_warning(
        concat("the state that the process before has left cannot be read: ", base::message_of(error)));
    return std::nullopt;
  }
}

void StateRegion::forget() {
  found_ = {};
  if (file_ == nullptr) return;
  try {
    if (before_ == nullptr) return file_->clear();
    file_->mark_empty();  // some of it may be in use
    std::exchange(before_, nullptr)->drop_all_but(nullptr);
  } catch (const SystemError& error) {
    warn_of_memory(error);
    give_up();
  }
}

bool StateRegion::fits(const StateSnapshot& state) const {
  if (table_ == nullptr || table_->tensors.size() != state.tensors.size() ||
      state.in_place.size() != state.tensors.size())
    return false;
  for (std::size_t i = 0; i < state.tensors.size(); ++i) {
    const at::Tensor& tensor = state.tensors[i];
    const Table::TensorPlace& place = table_->tensors[i];
    if (place.storage == kNotInPlace) {
      if (!tensor.is_cpu() || (state.in_place[i] && tensor.storage().use_count() > 1)) return false;
      if (!place.is_like(dense(tensor))) return false;
      continue;
    }
    const StoragePlace& storage = table_->storages[static_cast<std::size_t>(place.storage)];
    if (!place.is_like(tensor) || tensor.storage_offset() != place.offset || !state.in_place[i] ||
        tensor.storage().data() != storage.data() || tensor.storage().nbytes() != storage.bytes)
      return false;
  }
  return true;
}

// Memory of the process before that has the bytes of a storage already.
std::optional<StateRegion::StoragePlace> StateRegion::find_equal(const StateSnapshot& state,
                                                                 std::size_t tensor) {
  if (before_ == nullptr || tensor >= before_->tensors.size()) return std::nullopt;
  const Table::TensorPlace& place = before_->tensors[tensor];
  if (place.storage == kNotInPlace || !place.is_like(state.tensors[tensor])) return std::nullopt;
  StoragePlace& storage = before_->storages[static_cast<std::size_t>(place.storage)];
  const at::Storage& own = state.tensors[tensor].storage();
  if (storage.is_taken || own.nbytes() != storage.bytes ||
      std::memcmp(own.data(), storage.data(), storage.bytes) != 0)
    return std::nullopt;
  storage.is_taken = true;
  return storage;
}

// Throws: SystemError where there is no memory. Then some storages may have moved: they stay where they are.
void StateRegion::move_in(const StateSnapshot& state) {
  const StorageLayout layout(state);
  auto table = std::make_unique<Table>();
  for (const at::Tensor& tensor : state.tensors) {
    const at::Tensor laid_out = dense(tensor);
    table->tensors.push_back(
        {kNotInPlace, 0, laid_out.sizes().vec(), laid_out.strides().vec(), laid_out.scalar_type()});
  }
  std::uint64_t new_bytes = 0;
  std::vector<std::size_t> new_storages;
  for (std::size_t s = 0; s < layout.storages.size(); ++s) {
    c10::StorageImpl& storage = *layout.storages[s];
    for (const std::size_t i : layout.groups[s]) {
      const at::Tensor& tensor = state.tensors[i];
      table->tensors[i] = {static_cast<int>(s), tensor.storage_offset(), tensor.sizes().vec(),
                           tensor.strides().vec(), tensor.scalar_type()};
    }
    const auto lies_there = [&](const StoragePlace& place) {
      return place.data() == storage.data() && place.bytes == storage.nbytes();
    };
    if (table_ != nullptr) {
      const auto known = std::ranges::find_if(table_->storages, lies_there);
      if (known != table_->storages.end()) {
        table->storages.push_back(*known);
        continue;
      }
    }
    if (const auto equal = find_equal(state, layout.groups[s].front())) {
      storage.set_data_ptr(pointer_into(equal->memory, equal->begin));
      table->storages.push_back(*equal);
      continue;
    }
    table->storages.push_back({nullptr, new_bytes, storage.nbytes()});
    new_bytes += aligned(storage.nbytes());
    new_storages.push_back(s);
  }
  const auto memory = new_bytes > 0 ? file_->allocate(new_bytes) : nullptr;
  for (const std::size_t s : new_storages) {
    StoragePlace& place = table->storages[s];
    place.memory = memory;
    memory->reserve(place.begin, place.bytes);
    std::memcpy(place.data(), layout.storages[s]->data(), place.bytes);
    layout.storages[s]->set_data_ptr(pointer_into(memory, place.begin));
    base::reach_fault_point("moved");
  }
  table->write_text();
  if (table_ != nullptr) replaced_.push_back(std::move(table_));
  table_ = std::move(table);
}

void StateRegion::prepare(const StateSnapshot& state) {
  if (file_ == nullptr || !reason_against(state).empty()) return;  // commit() says so
  try {
    move_in(state);
  } catch (const SystemError& error) {
    warn_of_memory(error);
    give_up();
  }
}

void StateRegion::commit(std::uint64_t steps, const StateSnapshot& state) {
  if (file_ == nullptr) return;
  if (const std::string reason = reason_against(state); !reason.empty()) {
    base::log_info(concat("the state is in no memory that outlives this process: ", reason));
    return give_up();
  }
  try {
    if (!fits(state)) move_in(state);
    write_record(steps, state);
  } catch (const SystemError& error) {
    warn_of_memory(error);
    return give_up();
  }
  if (before_ != nullptr) replaced_.push_back(std::move(before_));
  for (const auto& table : std::exchange(replaced_, {})) table->drop_all_but(table_.get());
}

void StateRegion::write_record(std::uint64_t steps, const StateSnapshot& state) {
  std::vector<at::Tensor> copies;
  RecordSizes sizes{.table = table_->text.size(), .text = state.text.size()};
  std::vector<std::span<const std::byte>> parts{std::as_bytes(std::span(&sizes, 1)),
                                                std::as_bytes(std::span(table_->text)),
                                                std::as_bytes(std::span(state.text))};
  for (std::size_t i = 0; i < state.tensors.size(); ++i) {
    if (table_->tensors[i].storage != kNotInPlace) continue;
    copies.push_back(dense(state.tensors[i]));
    parts.push_back(bytes_of_tensor(copies.back()));
    sizes.copies += parts.back().size();
  }
  file_->commit(steps, parts);
}

void StateRegion::mark_changing(std::uint64_t steps) {
  if (file_ != nullptr) file_->mark_changing(steps);
}

}  // namespace cohort::elastic
