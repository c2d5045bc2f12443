// save() writes the programs that need no gradient. It collects captured tensors by storage, so that views of
// one storage share memory again when they are loaded. Tapes go into the metadata as JSON (tape_json.h), and
// storages into the file as flat tensors. load() checks the format's version, the checksum of the JSON, its
// form, and each storage when a value first asks for it. Always: a damaged byte is an error, and never
// another result. Surprising: a storage is saved from its first used element to its last, and `begin` says
// where in the storage that was.
#include "cohort/script/file.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/version.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/text/bounded_json.h"
#include "cohort/checkpoint/safetensors.h"
#include "cohort/script/internal/execute/loaded_recording.h"
#include "cohort/script/internal/ir/tape_json.h"
#include "cohort/script/internal/record/cache.h"

// Note [The file]
// A safetensors file. Its metadata hold format_version, `program`, a JSON text with the tapes, the storages
// and the user's metadata, and the checksum of that text; the text holds the checksums of the tensors. A
// tensor is the memory of one storage, flat, from the first element that is used to the last; what lies
// unused between is zero. So every byte of the file is checked, by these sums or as the header's form.
namespace cohort::script {
namespace {

using base::concat;
using nlohmann::json;

constexpr std::int64_t kFormatVersion = 1;
constexpr const char* kSaveHint =
    "model->eval(), two calls for each size of input under at::NoGradGuard, then save()";

std::string sum_of(std::span<const std::byte> bytes) {
  return checkpoint::checksum_text(checkpoint::checksum(bytes));
}
std::string sum_of(const std::string& text) {
  return sum_of(std::as_bytes(std::span(text)));
}
std::string sum_of(const at::Tensor& flat) {
  return sum_of({static_cast<const std::byte*>(flat.const_data_ptr()), flat.nbytes()});
}

// The numbers as they lie in memory.
at::Tensor physical(at::Tensor tensor) {
  if (tensor.is_conj()) tensor = tensor.conj();
  return tensor.is_neg() ? tensor._neg_view() : tensor;
}

// The first element after those of `layout`.
std::int64_t end_of(const Layout& layout) {
  std::int64_t last = layout.offset;
  for (std::size_t i = 0; i < layout.sizes.size(); ++i) {
    if (layout.sizes[i] == 0) return layout.offset;
    last += (layout.sizes[i] - 1) * layout.strides[i];
  }
  return last + 1;
}

// The storages that programs captured, each once.
class Storages {
 public:
  std::size_t add(const at::Tensor& tensor) {
    const auto [known, is_new] =
        numbers_.try_emplace(tensor.storage().unsafeGetStorageImpl(), storages_.size());
    if (is_new) storages_.emplace_back();
    Tensors& tensors = storages_[known->second];
    // A storage is one tensor of the file, and a tensor has one type.
    if (!tensors.empty() && tensors.front().scalar_type() != tensor.scalar_type()) {
      throw UsageError("script.save",
                       concat("tensors of types ", tensors.front().scalar_type(), " and ",
                              tensor.scalar_type(), " lie in one storage, and are captured"),
                       "copies of their own: clone()");
    }
    tensors.push_back(tensor);
    return known->second;
  }

  // Their places in the file and their elements.
  json write(checkpoint::TensorMap& file) const {
    const at::NoGradGuard no_grad;
    json all = json::array();
    for (const Tensors& tensors : storages_) {
      std::int64_t begin = std::numeric_limits<std::int64_t>::max(), end = 0;
      for (const at::Tensor& tensor : tensors) {
        begin = std::min(begin, tensor.storage_offset());
        end = std::max(end, end_of(Layout::of(tensor)));
      }
      begin = std::min(begin, end);
      // Only what is used is copied: the rest of a storage may be uninitialized.
      const at::Tensor flat = at::zeros({end - begin}, tensors.front().options().device(at::kCPU));
      for (const at::Tensor& tensor : tensors) {
        flat.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset() - begin)
            .copy_(physical(tensor));
      }
      const std::string name = concat("storage.", file.size());
      all.push_back({{"tensor", name},
                     {"begin", begin},
                     {"dtype", c10::toString(flat.scalar_type())},
                     {"xxh3_64", sum_of(flat)}});
      file.emplace_back(name, flat);
    }
    return all;
  }

 private:
  std::vector<Tensors> storages_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> numbers_;
};

json environment_json(const Environment& environment) {
  json autocast = json::array();
  for (std::size_t i = 0; i < environment.autocast.size(); ++i) {
    autocast.push_back(environment.autocast[i] ? c10::toString(environment.autocast_dtype[i]) : "");
  }
  return {{"grad", environment.grad},
          {"inference", environment.inference},
          {"deterministic", environment.deterministic},
          {"default_dtype", c10::toString(environment.default_dtype)},
          {"autocast", std::move(autocast)}};
}

Environment environment_of(const json& from) {
  Environment environment{.grad = from.at("grad").get<bool>(),
                          .inference = from.at("inference").get<bool>(),
                          .deterministic = from.at("deterministic").get<bool>(),
                          .default_dtype = scalar_type_of(from.at("default_dtype").get<std::string>())};
  for (std::size_t i = 0; i < environment.autocast.size(); ++i) {
    const auto dtype = from.at("autocast").at(i).get<std::string>();
    environment.autocast[i] = !dtype.empty();
    if (!dtype.empty()) environment.autocast_dtype[i] = scalar_type_of(dtype);
  }
  return environment;
}

void reject_offsets(const Tape& tape) {
  if (!tape.needs_input_storages()) return;
  throw UsageError("script.save",
                   "the function reads its input's storage with as_strided, beyond what the input shows",
                   "clone() of the input first");
}

class FileReader {
 public:
  explicit FileReader(const std::filesystem::path& path)
      : path_(path.string()), file_(checkpoint::SafetensorsFile::open(path)) {
    const auto& metadata = file_.metadata();
    const auto version = metadata.find("format_version");
    const auto text = metadata.find("program"), sum = metadata.find("xxh3_64");
    if (version == metadata.end() || text == metadata.end() || sum == metadata.end()) {
      fail("is no program of script mode", "a file that fast.save() or `cohort export` wrote");
    }
    if (version->second != std::to_string(kFormatVersion)) {
      fail(concat("has format version ", version->second, ", this Cohort reads version ", kFormatVersion),
           "the Cohort that saved it, or a newer one");
    }
    if (sum_of(text->second) != sum->second) damaged("its program");
    std::optional<json> program = base::parse_bounded_json(text->second);
    if (!program) fail("is no program of script mode: its JSON is broken or too deep", "a copy of the file");
    json_ = std::move(*program);
  }

  const json& parsed() const { return json_; }
  const std::string& path() const { return path_; }
  [[noreturn]] void fail(const std::string& what, const std::string& hint) const {
    throw DataError("script.load", concat(path_, " ", what), hint);
  }

  at::Tensor restore(std::size_t number, const Layout& layout) {
    const at::Tensor& memory = storage(number, layout.device);
    at::Tensor tensor = memory.as_strided(layout.sizes, layout.strides, layout.offset);
    if (layout.conjugate) tensor = tensor.conj();
    return layout.negative ? tensor._neg_view() : tensor;
  }

 private:
  [[noreturn]] void damaged(const std::string& what) const {
    fail(concat("is damaged: ", what, " has another checksum than when it was saved"), "a copy of the file");
  }

  // Memory of its own, aligned as LibTorch does it, with elements where they were in the storage.
  const at::Tensor& storage(std::size_t number, c10::Device device) {
    at::Tensor& memory = storages_[number];
    if (memory.defined()) return memory;
    const json& from = json_.at("storages").at(number);
    const auto name = from.at("tensor").get<std::string>();
    const at::Tensor flat = file_.tensor(name);
    if (flat.dim() != 1 || from.at("dtype") != c10::toString(flat.scalar_type()) ||
        from.at("xxh3_64") != sum_of(flat)) {
      damaged(name);
    }
    const auto begin = from.at("begin").get<std::int64_t>();
    memory = at::empty({begin + flat.numel()}, flat.options().device(device));
    memory.narrow(0, begin, flat.numel()).copy_(flat);
    return memory;
  }

  std::string path_;
  checkpoint::SafetensorsFile file_;
  json json_;
  std::map<std::size_t, at::Tensor> storages_;
};

}  // namespace

void save(const std::filesystem::path& path, const std::vector<const Cache*>& caches,
          const Metadata& metadata) {
  Storages storages;
  json programs = json::array();
  std::string left_out;
  for (const Cache* cache : caches) {
    for (const auto& entry : cache->live_entries()) {
      const auto program = entry->program();
      // Seen in one call only, or eager: the log says so, since a user would expect it in the file.
      if (program == nullptr && !entry->environment().grad) left_out += entry->explain();
      if (program == nullptr || program->trace().has_backward) continue;
      reject_offsets(program->trace().tape);
      json program_json =
          to_json(program->trace(), [&](const at::Tensor& tensor) { return storages.add(tensor); });
      program_json["environment"] = environment_json(entry->environment());
      programs.push_back(std::move(program_json));
    }
  }
  if (programs.empty()) {
    std::string all;
    for (const Cache* cache : caches) all += cache->explain();
    throw UsageError(
        "script.save",
        concat("there is no program that needs no gradient, for modules as they are now:\n", all), kSaveHint);
  }
  if (!left_out.empty()) {
    base::log_warning(
        concat("[script.save] left out of ", path.string(), ", as there is no program:\n", left_out));
  }
  checkpoint::TensorMap tensors;
  json memory = storages.write(tensors);
  const json all{{"libtorch", TORCH_VERSION},
                 {"metadata", metadata},
                 {"storages", std::move(memory)},
                 {"programs", std::move(programs)}};
  std::string text;
  try {
    text = all.dump();
  } catch (const json::exception& error) {
    throw UsageError("script.save", concat("the metadata cannot be written as JSON: ", error.what()));
  }
  checkpoint::save_safetensors(
      path, tensors,
      {{"format_version", std::to_string(kFormatVersion)}, {"program", text}, {"xxh3_64", sum_of(text)}});
}

LoadedProgram load(const std::filesystem::path& path) {
  // A program may write to its tensors, and inference tensors reject that outside of inference mode.
  const c10::InferenceMode plain_tensors(false);
  const at::NoGradGuard no_grad;
  FileReader reader(path);
  try {
    const json& from = reader.parsed();
    const std::string saved =
        concat(reader.path(), " (saved with LibTorch ", from.at("libtorch").get<std::string>(), ")");
    const auto restore = [&](std::size_t number, const Layout& layout) {
      return reader.restore(number, layout);
    };
    std::vector<LoadedRecording> recordings;
    for (const json& each : from.at("programs")) {
      recordings.push_back({environment_of(each.at("environment")), trace_from_json(each, restore, saved)});
    }
    if (recordings.empty()) reader.fail("holds no program", "a file that fast.save() wrote");
    return {reader.path(), from.at("metadata").get<Metadata>(), std::move(recordings)};
  } catch (const json::exception& error) {
    reader.fail(concat("is no program of script mode: ", error.what()), "a file that fast.save() wrote");
  } catch (const c10::Error& error) {
    reader.fail(concat("does not run here: ", base::message_of(error)),
                "the device and LibTorch it was saved with");
  }
}

}  // namespace cohort::script
